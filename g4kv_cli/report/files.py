"""Result files that are whole at every moment: written beside the target and moved over it."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from g4kv_cli.errors import UsageError

_SYSTEM = frozenset(("dev", "proc", "sys"))
"""Top directories whose files are no files: /dev/stdout may well be a link to one."""


def write_whole(path: Path, text: str, option: str) -> None:
    """Replace ``path`` by ``text`` in one step. Raises UsageError, naming ``option``, if that is impossible.

    A symbolic link stays one: the file that it points to is replaced.
    """
    given, path = path, Path(os.path.realpath(path))
    if (path.exists() and not path.is_file()) or _SYSTEM.intersection(given.absolute().parts[1:2]):
        raise UsageError(f"{option} {given}: not a file; name a file that can be replaced")
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)
        why = error.strerror or str(error)
        raise UsageError(f"{option} {given}: cannot write: {why}; name a file in a directory that exists") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
