"""A case's arrays on disk (``g4kv smoke --dump DIR``): one .npz a case, plain arrays and one JSON text about them.

``about`` says which case on which kernels and device, and which arrays are bf16: NumPy keeps those as uint16. Names are
``input.q`` (uploaded), ``device.pool`` (what stood there at the end), and ``got.out``, ``want.out``, ``limit.out`` of
each comparison.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from g4kv_cli.errors import UsageError
from g4kv_cli.records.npz import load_npz

DUMP_FORMAT = 1
ABOUT = "about"
_BF16 = np.dtype(ml_dtypes.bfloat16)

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Dump:
    """One case: ``about`` as plain JSON values, ``arrays`` by name, bf16 ones as ml_dtypes.bfloat16."""

    about: dict[str, Any]
    arrays: dict[str, Array]

    def __getitem__(self, name: str) -> Array:
        """An array by its name."""
        return self.arrays[name]


def dump_bytes(about: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    """The file's content."""
    bf16 = [name for name, values in arrays.items() if values.dtype == _BF16]
    text = json.dumps({"format": DUMP_FORMAT, **about, "bf16": bf16})
    plain = {name: values.view(np.uint16) if name in bf16 else values for name, values in arrays.items()}
    stream = io.BytesIO()
    np.savez_compressed(stream, allow_pickle=False, **{ABOUT: np.array(text)}, **plain)
    return stream.getvalue()


def load_dump(path: str | Path) -> Dump:
    """Read a file that ``g4kv smoke --dump`` wrote. Raises UsageError if it is none."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"dump {file}: no such file; name an .npz file that g4kv smoke --dump wrote")
    arrays = load_npz(file, "dump")
    try:
        about = json.loads(str(arrays.pop(ABOUT)))
        if about["format"] != DUMP_FORMAT:
            raise UsageError(f"dump {file}: format {about['format']}, this g4kv reads {DUMP_FORMAT}")
        views = {name: arrays[name].view(_BF16) for name in about["bf16"]}
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"dump {file}: it lacks {error}; name an .npz file that g4kv smoke --dump wrote") from error
    return Dump(about, {name: views.get(name, values) for name, values in arrays.items()})
