"""What a process has made of a kernel, in a form that later processes can read.

To read and lower a kernel takes a hundred times as long as to launch a small one. What comes of it depends on the PTX
and on the modules of this package alone: an entry's name is a digest of both, so that any change of either makes a new
entry and nothing old is ever taken for it.

An entry is a pickle, of classes and functions of this package alone: anything else that it names is refused.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from functools import cache
from pathlib import Path
from typing import Any, Protocol

_PACKAGE = __package__
_BUILTINS = frozenset({"set", "frozenset", "range", "slice", "complex"})


class Store(Protocol):
    """Bytes by names, on disk say."""

    def read(self, key: str) -> bytes | None:
        """Those of a name, whole as they were written, or None."""

    def write(self, key: str, data: bytes) -> None:
        """Store bytes under a name, if that is possible."""


@cache
def translator_digest() -> str:
    """Digest of all modules of this package, and of the Python that runs them."""
    return digest_of(Path(__file__).parent)


def digest_of(folder: Path) -> str:
    """Digest of a package's modules in a folder, by their names and contents, and of the Python that runs them."""
    total = hashlib.sha256(sys.version.encode())
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        total.update(f"\n{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return total.hexdigest()


def translation_key(*parts: str) -> str:
    """The name of what this package makes of these texts."""
    total = hashlib.sha256(translator_digest().encode())
    for part in parts:
        text = part.encode()
        total.update(len(text).to_bytes(8, "little") + text)
    return total.hexdigest()


def packed(value: Any) -> bytes | None:
    """What ``unpacked`` makes the same value of; None for one that holds what has no form on disk, a closure say."""
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PickleError, AttributeError, TypeError):
        return None


def unpacked(data: bytes) -> Any:
    """The value; None if the bytes hold none, or one that names what is not this package's."""
    if not data:
        return None
    try:
        return _Reader(io.BytesIO(data)).load()
    except (pickle.PickleError, AttributeError, TypeError, EOFError, ImportError, IndexError, KeyError, ValueError):
        return None


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "builtins" and name in _BUILTINS:
            return super().find_class(module, name)
        if _is_own(module):
            found = super().find_class(module, name)
            if _is_own(getattr(found, "__module__", None)):  # not what a module of this package imports
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is none of {_PACKAGE}")


def _is_own(module: Any) -> bool:
    return isinstance(module, str) and f"{module}.".startswith(f"{_PACKAGE}.")
