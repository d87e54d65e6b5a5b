"""The contract's rules: a registry of everything that a request is checked for before a launch.

A rule has a stable code; ``require`` is the only place that raises. A rule that one module checks is declared there,
beside its arithmetic; those that several check stand below. The reject catalogue (cases/reject) proves that each of
them rejects and lets pass: a new rule is one declaration with its check, and a case.
"""

from __future__ import annotations

from dataclasses import dataclass

from g4kv_cli.errors import ContractError

RULES: dict[str, Rule] = {}

_SHOWN_CHARACTERS = 120
_SHOWN_BITS = 256


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: ``code`` is stable, ``sentence`` says what is wrong when it does not hold."""

    code: str
    sentence: str

    def require(self, holds: bool, field: str, got: object, want: object) -> None:
        """Raise ContractError unless ``holds``."""
        if not holds:
            raise ContractError(self.code, field, shown(got), want, self.sentence)


def shown(value: object) -> object:
    """``value`` itself if its text is short, else a text that is: an error stays one readable line.

    An integer of thousands of digits has no text at all in Python, so it is described.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value.bit_length() <= _SHOWN_BITS else f"an integer of {value.bit_length()} bits"
    text = str(value)
    return value if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def rule(code: str, sentence: str) -> Rule:
    """Declare a rule. The sentence follows the name of the field at fault and fits every use of the rule."""
    if code in RULES:
        raise ValueError(f"rule {code} is declared twice")
    RULES[code] = Rule(code, sentence)
    return RULES[code]


# Checked in several modules
FITS_I32 = rule("fits_i32", "does not fit the 32-bit integer the kernel indexes with")
EXTENT_POSITIVE = rule("extent_positive", "must be at least 1")
DTYPE = rule("dtype", "has the wrong element type")
SHAPE = rule("shape", "has the wrong shape")
HEAD_DIM = rule("head_dim", "is not a head_dim that the kernels at hand are compiled for")
Q_HEADS_MULTIPLE = rule("q_heads_multiple", "is not a positive multiple of the KV heads")
LAYER_RANGE = rule("layer_range", "is outside the pool's layers")
START_POS = rule("start_pos", "must not be negative")
POSITION_RANGE = rule("position_range", "is outside the RoPE tables")
HOST_COPY = rule("host_copy", "is not the int32 copy, of the same length, of the array on the device")
PAGE_ORIGIN = rule("page_origin", "must not be negative or past the page of the first position")
PAGE_COVERAGE = rule("page_coverage", "does not reach the page of every position")
PAGE_ID_RANGE = rule("page_id_range", "names a page that the pool does not have")
LAST_PAGE_LEN = rule("last_page_len", "must be at least 1 and at most page_size")
