"""Modifiers of an opcode in the order of the PTX manual: inline assembly and libcu++ write them in others too.

Only opcodes whose every part is known here are reordered; the meaning of no modifier depends on its place among these.
"""

from __future__ import annotations

from functools import lru_cache

from .parse import TYPE_BYTES

_ORDER = ("weak", "volatile", "mmio", "relaxed", "acquire", "release", "acq_rel", "sc")
_SCOPE = ("cta", "cluster", "gpu", "sys")
_SPACE = ("global", "shared", "shared::cta", "shared::cluster", "local", "param", "const")
_EVICTION = ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")
_TYPES = (*TYPE_BYTES, "pred", "bf16x2", "f16x2", "b128")
_OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")

_ACCESS = (
    _ORDER,
    _SCOPE,
    _SPACE,
    ("ca", "cg", "cs", "lu", "cv", "wb", "wt"),
    ("nc",),
    tuple(f"L1::{word}" for word in _EVICTION),
    tuple(f"L2::{word}" for word in _EVICTION),
    ("L2::cache_hint",),
    ("L2::64B", "L2::128B", "L2::256B"),
    ("v2", "v4", "v8"),
)
_ATOMIC = (
    _ORDER,
    _SCOPE,
    _SPACE,
    _OPERATIONS,
    ("noftz",),
    ("L2::cache_hint",),
    ("v2", "v4", "v8"),
)
_MATRIX = (
    ("sync",),
    ("aligned",),
    ("m8n8",),
    ("x1", "x2", "x4"),
    ("trans",),
    _SPACE,
)


def _ranks(classes: tuple[tuple[str, ...], ...]) -> dict[str, int]:
    return {word: rank for rank, words in enumerate(classes) for word in words}


_RANKS = {
    **dict.fromkeys(("ld", "st"), _ranks(_ACCESS)),
    **dict.fromkeys(("atom", "red"), _ranks(_ATOMIC)),
    **dict.fromkeys(("ldmatrix", "stmatrix"), _ranks(_MATRIX)),
}
"""By the first word of an opcode: the place of each modifier; the type comes last."""


@lru_cache(maxsize=4096)
def ordered(opcode: str) -> str:
    """The opcode with its modifiers in the manual's order; itself if any of them is not known here."""
    head, *parts = opcode.split(".")
    ranks = _RANKS.get(head)
    if ranks is None or not parts or parts[-1] not in _TYPES or any(part not in ranks for part in parts[:-1]):
        return opcode
    return ".".join((head, *sorted(parts[:-1], key=ranks.__getitem__), parts[-1]))
