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
    RULES[code] = Rule(code, sentence)
    return RULES[code]


# Arguments and numbers
ARGUMENT_TYPE = rule("argument_type", "is not the kind of argument this takes")
INTEGER = rule("integer", "must be an integer")
FITS_I32 = rule("fits_i32", "does not fit the 32-bit integer the kernel indexes with")
FITS_I64 = rule("fits_i64", "does not fit a signed 64-bit element offset")
EPS = rule("eps", "must be finite in float32 and not negative")

# Layout and pool
EXTENT_POSITIVE = rule("extent_positive", "must be at least 1")
HEAD_DIM = rule("head_dim", "is not a head_dim that the kernels at hand are compiled for")
KV_HEADS = rule("kv_heads", "differs from the KV heads of the request")
KV_BLOCK_LEN = rule("kv_block_len", "contradicts page_size * num_kv_heads * head_dim")
LAYER_STRIDE = rule("layer_stride", "contradicts 2 * kv_block_len")
PAGE_STRIDE = rule("page_stride", "contradicts num_layers * layer_stride")
LAYER_RANGE = rule("layer_range", "is outside the pool's layers")
ELEMENT_BYTES = rule("element_bytes", "is not the 2 bytes of the bf16 that the kernels store")
POOL_NOT_EMPTY = rule("pool_not_empty", "holds less than one page")
POOL_WHOLE_PAGES = rule("pool_whole_pages", "is not a whole number of pages")

# Arrays
DEVICE_ARRAY = rule("device_array", "must be a device array")
SAME_DEVICE = rule("same_device", "lives on another device than the one that launches")
NOT_FREED = rule("not_freed", "was freed")
DTYPE = rule("dtype", "has the wrong element type")
CONTIGUOUS = rule("contiguous", "must be row-contiguous")
ALIGNED = rule("aligned", "starts on an address that the kernel's accesses do not divide")
SHAPE = rule("shape", "has the wrong shape")
INSIDE_ALLOCATION = rule("inside_allocation", "reaches outside the memory it was made from")
NO_OVERLAP = rule("no_overlap", "shares memory with another argument while one of them is written")

# Request
Q_HEADS_MULTIPLE = rule("q_heads_multiple", "is not a positive multiple of the KV heads")
ROTARY_DIM = rule("rotary_dim", "must be even, at least 2 and at most head_dim")
ROPE_TABLE = rule("rope_table", "is shorter than cos_max_pos rows of rotary_dim")
START_POS = rule("start_pos", "must not be negative")
POSITION_RANGE = rule("position_range", "is outside the RoPE tables")

# Page metadata
HOST_COPY = rule("host_copy", "has not the length of the array on the device that it is a copy of")
PAGE_ORIGIN = rule("page_origin", "must not be negative or past the page of the first position")
PAGE_COVERAGE = rule("page_coverage", "does not reach the page of every position")
PAGE_ID_RANGE = rule("page_id_range", "names a page that the pool does not have")
PAGE_INDPTR = rule("page_indptr", "must start at 0, never fall, and end at the number of page indices")

# Plan: what is built
LAST_PAGE_LEN = rule("last_page_len", "must be at least 1 and at most page_size")

# Plan: where it is used

# Attention
GQA_GROUP = rule("gqa_group", "is more query heads a KV head than a tile of packed rows holds")
NUM_SPLITS = rule("num_splits", "must be at least 1 and at most what a grid's second axis holds")
WORKSPACE = rule("workspace", "is smaller than these tokens, heads, splits and head_dim need")
