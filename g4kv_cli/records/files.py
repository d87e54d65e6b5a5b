"""Result files that are whole at every moment: written beside the target and moved over it."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from g4kv_cli.errors import UsageError

_SYSTEM = frozenset(("dev", "proc", "sys"))
"""Top directories whose files are no files: /dev/stdout may well be a link to one."""


def write_whole(path: Path, content: str | bytes, option: str) -> None:
    """Replace ``path`` by ``content`` in one step. Raises UsageError, naming ``option``, if that is impossible.

    A symbolic link stays one: the file that it points to is replaced.
    """
    given, path = path, _target(path, option)
    data = content.encode() if isinstance(content, str) else content
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)
        raise unwritable(given, option, error) from error


def write_new(path: Path, content: str | bytes, option: str) -> None:
    """:func:`write_whole` where nothing is yet: UsageError, too, where something is, if only a link to nothing."""
    if os.path.lexists(path):
        raise unwritable(path, option, FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)))
    write_whole(path, content, option)


def require_place(path: Path, option: str) -> None:
    """Raises UsageError where :func:`write_whole` could not write, for want of a directory say, before any work."""
    if not _target(path, option).parent.is_dir():
        raise unwritable(path, option, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))


def require_directory_place(path: Path, option: str) -> None:
    """The same for :func:`make_directory`."""
    if not path.is_dir() and not path.parent.is_dir():
        raise unwritable(path, option, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))


def make_directory(path: Path, option: str) -> bool:
    """Make a directory that was asked for; True if it was not there. As for a file, what it stands in has to be there.

    Raises UsageError, naming ``option``.
    """
    try:
        path.mkdir()
    except FileExistsError as error:
        if not path.is_dir():
            raise unwritable(path, option, error) from error
        return False
    except OSError as error:
        raise unwritable(path, option, error) from error
    return True


def _target(given: Path, option: str) -> Path:
    path = Path(os.path.realpath(given))
    if (path.exists() and not path.is_file()) or _SYSTEM.intersection(given.absolute().parts[1:2]):
        raise UsageError(f"{option} {given}: not a file; name a file that can be replaced")
    return path


def unwritable(path: Path, option: str, error: OSError) -> UsageError:
    """The error for a file or directory that cannot be written: why, and what to do about that."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        todo = "free some space there, or name a file elsewhere"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        todo = "name one in a directory that you may write to"
    elif error.errno == errno.ENAMETOOLONG:
        todo = "name it shorter"
    elif error.errno in (errno.EEXIST, errno.ENOTDIR):
        todo = "a file is in the way: name another"
    else:
        todo = "name one in a directory that exists"
    return UsageError(f"{option} {path}: cannot write: {error.strerror or error}; {todo}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
