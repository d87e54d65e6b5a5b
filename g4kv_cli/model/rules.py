"""The contract's rules: a registry of everything that a request is checked for before a launch.

A rule has a stable code; ``require`` is the only place that raises. Rules stand in FIELD order: the layout, the
arrays, the request, the page metadata, the plan. The reject catalogue proves that each of them rejects and lets pass.
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


def _rule(code: str, sentence: str) -> Rule:
    RULES[code] = Rule(code, sentence)
    return RULES[code]


# Arguments and numbers
ARGUMENT_TYPE = _rule("argument_type", "is not the kind of argument this takes")
INTEGER = _rule("integer", "must be an integer")
FITS_I32 = _rule("fits_i32", "does not fit the 32-bit integer the kernel indexes with")
FITS_I64 = _rule("fits_i64", "does not fit a signed 64-bit element offset")
EPS = _rule("eps", "must be finite in float32 and not negative")

# Layout and pool
EXTENT_POSITIVE = _rule("extent_positive", "must be at least 1")
HEAD_DIM = _rule("head_dim", "is not the head_dim this entry is compiled for")
KV_HEADS = _rule("kv_heads", "differs from the KV heads of the request")
KV_BLOCK_LEN = _rule("kv_block_len", "contradicts page_size * num_kv_heads * head_dim")
LAYER_STRIDE = _rule("layer_stride", "contradicts 2 * kv_block_len")
PAGE_STRIDE = _rule("page_stride", "contradicts num_layers * layer_stride")
LAYER_RANGE = _rule("layer_range", "is outside the pool's layers")
ELEMENT_BYTES = _rule("element_bytes", "is not the 2 bytes of the bf16 that the kernels store")
POOL_NOT_EMPTY = _rule("pool_not_empty", "holds less than one page")
POOL_WHOLE_PAGES = _rule("pool_whole_pages", "is not a whole number of pages")

# Arrays
DEVICE_ARRAY = _rule("device_array", "must be a device array")
SAME_DEVICE = _rule("same_device", "lives on another device than the one that launches")
NOT_FREED = _rule("not_freed", "was freed")
DTYPE = _rule("dtype", "has the wrong element type")
CONTIGUOUS = _rule("contiguous", "must be row-contiguous")
ALIGNED = _rule("aligned", "starts on an address that the kernel's accesses do not divide")
SHAPE = _rule("shape", "has the wrong shape")
INSIDE_ALLOCATION = _rule("inside_allocation", "reaches outside the memory it was made from")
NO_OVERLAP = _rule("no_overlap", "shares memory with another argument while one of them is written")

# Request
Q_HEADS_MULTIPLE = _rule("q_heads_multiple", "is not a positive multiple of the KV heads")
ROTARY_DIM = _rule("rotary_dim", "must be even, at least 2 and at most head_dim")
ROPE_TABLE = _rule("rope_table", "is shorter than cos_max_pos rows of rotary_dim")
START_POS = _rule("start_pos", "must not be negative")
POSITION_RANGE = _rule("position_range", "is outside the RoPE tables")

# Page metadata
HOST_COPY = _rule("host_copy", "has not the length of the array on the device that it is a copy of")
PAGE_ORIGIN = _rule("page_origin", "must not be negative or past the page of the first position")
PAGE_COVERAGE = _rule("page_coverage", "does not reach the page of every position")
PAGE_ID_RANGE = _rule("page_id_range", "names a page that the pool does not have")
PAGE_INDPTR = _rule("page_indptr", "must start at 0, never fall, and end at the number of page indices")
SLOT_UNIQUE = _rule("slot_unique", "takes the slot of another token of the same call")

# Plan: what is built
Q_LEN = _rule("q_len", "must not be negative (0 for a request without new tokens)")
PAGE_LIST_NOT_EMPTY = _rule("page_list_not_empty", "must hold at least one page")
LAST_PAGE_LEN = _rule("last_page_len", "must be at least 1 and at most page_size")
LENGTH_EQUATION = _rule(
    "length_equation", "contradicts (pages - 1) * page_size + last_page_len == start_pos + q_len - released"
)
WINDOW_LEFT = _rule("window_left", "must be -1 (no window) or at least 0")
WINDOW_PAGES = _rule("window_pages", "releases a page that the first query still sees")
SM_SCALE = _rule("sm_scale", "must be a number that is finite in float32")
CTA_TILE_Q = _rule("cta_tile_q", "is not a tile that the kernels are compiled for")
CAPACITY = _rule("capacity", "does not fit the array that the plan has for it")

# Plan: where it is used
PLAN_SET = _rule("plan_set", "was preallocated and holds no requests yet")
PLAN_TILE = _rule("plan_tile", "is not the tile that this call derives: the plan was made under an override")
PLAN_HEAD_DIM = _rule("plan_head_dim", "is of the other family: the plan was made for another head_dim")
PLAN_HEADS = _rule("plan_heads", "differs from the heads that the plan was made for")
PLAN_PAGE_SIZE = _rule("plan_page_size", "differs from the page size that the plan was made for")
PLAN_ROWS = _rule("plan_rows", "has fewer rows than the plan has tokens")

# Attention
GQA_GROUP = _rule("gqa_group", "is more query heads a KV head than a tile of packed rows holds")
Q_LEN_ONE = _rule("q_len_one", "is for decode only where every request has one new token")
NUM_SPLITS = _rule("num_splits", "must be at least 1 and at most what a grid's second axis holds")
WORKSPACE = _rule("workspace", "is not the workspace of these tokens, heads, splits and head_dim")
