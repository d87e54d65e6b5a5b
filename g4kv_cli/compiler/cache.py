"""A cache of compiled images on disk, and of what is made of them: content-addressed, atomic, checked when read.

An entry is one file named after its key: a line of JSON (schema, key, checksum, the compiler's log), then
the image's bytes. Writers make a temporary file and rename it, so that parallel processes never see half an
entry; a truncated or corrupt entry fails its checksum and counts as missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CACHE_SCHEMA_VERSION = 1
CACHE_DIRECTORY_VARIABLE = "G4KV_CACHE_DIR"

_IMAGES, _TRANSLATIONS = "images", "translations"
_warned_directories: set[str] = set()


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A compiled image's bytes and the compiler's log."""

    data: bytes
    log: str


def cache_directory() -> Path | None:
    """``$G4KV_CACHE_DIR``, else ``g4kv`` under the user's cache directory; None if there is no home."""
    chosen = os.environ.get(CACHE_DIRECTORY_VARIABLE, "")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification says to ignore a relative one
        return Path(base) / "g4kv"
    try:
        return Path.home() / ".cache" / "g4kv"
    except RuntimeError:
        return None


def key_of(parts: tuple[str, ...]) -> str:
    """SHA-256 of the parts (in order, each with its length) and the schema version, as hex."""
    total = hashlib.sha256()
    for part in (str(CACHE_SCHEMA_VERSION), *parts):
        encoded = part.encode()
        total.update(len(encoded).to_bytes(8, "little"))
        total.update(encoded)
    return total.hexdigest()


class TranslationCache:
    """What the emulated device makes of images; the caller's names say all that it depends on."""

    def read(self, key: str) -> bytes | None:
        """The bytes of this name, or None if there are none that are whole."""
        entry = read(key, _TRANSLATIONS)
        return None if entry is None else entry.data

    def write(self, key: str, data: bytes) -> None:
        """Store bytes under a name, as ``write`` of this module does."""
        write(key, CacheEntry(data, ""), _TRANSLATIONS)


def read(key: str, folder: str = _IMAGES) -> CacheEntry | None:
    """The entry of this key, or None if there is none that is whole."""
    directory = cache_directory()
    if directory is None:
        return None
    try:
        raw = _entry_path(directory, key, folder).read_bytes()
    except OSError:
        return None
    head, _, data = raw.partition(b"\n")
    try:
        header = json.loads(head)
        log = str(header["log"])
        whole = header["key"] == key and header["sha256"] == _checksum(data, log)
    except (ValueError, KeyError, TypeError):
        return None
    return CacheEntry(data, log) if whole else None


def write(key: str, entry: CacheEntry, folder: str = _IMAGES) -> None:
    """Store an entry. Where that is impossible, say so once on stderr and go on without."""
    directory = cache_directory()
    if directory is None:
        return
    header = {
        "schema": CACHE_SCHEMA_VERSION,
        "key": key,
        "sha256": _checksum(entry.data, entry.log),
        "log": entry.log,
    }
    path = _entry_path(directory, key, folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_atomically(path, json.dumps(header).encode() + b"\n" + entry.data)
    except OSError as error:
        _warn_once(directory, error)


def _write_atomically(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _entry_path(directory: Path, key: str, folder: str) -> Path:
    return directory / folder / f"{key}.bin"


def _checksum(data: bytes, log: str) -> str:
    return hashlib.sha256(hashlib.sha256(data).digest() + log.encode()).hexdigest()


def _warn_once(directory: Path, error: OSError) -> None:
    if str(directory) in _warned_directories:
        return
    _warned_directories.add(str(directory))
    reason = error.strerror or type(error).__name__
    sys.stderr.write(
        f"g4kv: warning: cannot write the kernel cache {directory} ({reason}); compiling without it. "
        f"Set {CACHE_DIRECTORY_VARIABLE} to a directory that can be written.\n"
    )
