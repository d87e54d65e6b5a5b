"""Recorded arrays on disk: .npz files without pickles, and one clear line for a file that is not one."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.errors import UsageError

Array = npt.NDArray[Any]

_UNREADABLE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, TypeError, AttributeError)


def npz_files(path: Path, option: str) -> list[Path]:
    """The file itself, or all ``*.npz`` of a directory by name. UsageError naming ``option`` if there is none."""
    if path.is_dir():
        files = sorted(path.glob("*.npz"))
        if not files:
            raise UsageError(f"{option} {path}: no .npz file in this directory; name one that has recordings")
        return files
    if not path.is_file():
        raise UsageError(f"{option} {path}: no such file or directory; name an .npz file or a directory of them")
    return [path]


def load_npz(path: Path, what: str, names: Container[str] | None = None) -> dict[str, Array]:
    """The arrays of a file, or only those of ``names``. UsageError, in which it is a ``what``, if it is unreadable."""
    try:
        if not zipfile.is_zipfile(path):
            raise UsageError(f"{what} {path} is no .npz file; name one that numpy.savez wrote")
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files if names is None or name in names}
    except _UNREADABLE as error:
        # NumPy's own words on pickles recommend to load them.
        why = "it holds pickled objects" if "pickle" in str(error) else " ".join(str(error).split())
        raise UsageError(f"{what} {path} cannot be read: {why}; write it again as plain arrays") from error
