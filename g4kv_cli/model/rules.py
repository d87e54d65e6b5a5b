"""The contract's rules: a registry of everything that a request is checked for before a launch.

A rule has a stable code; ``require`` is the only place that raises. Rules stand in FIELD order: the layout, the
arrays, the request, the page metadata. The reject catalogue proves that each of them rejects and lets pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from g4kv_cli.errors import ContractError

RULES: dict[str, Rule] = {}


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: ``code`` is stable, ``sentence`` says what is wrong when it does not hold."""

    code: str
    sentence: str

    def require(self, holds: bool, field: str, got: object, want: object) -> None:
        """Raise ContractError unless ``holds``."""
        if not holds:
            raise ContractError(self.code, field, got, want, self.sentence)


def _rule(code: str, sentence: str) -> Rule:
    RULES[code] = Rule(code, sentence)
    return RULES[code]


# Numbers
INTEGER = _rule("integer", "must be an integer")
FITS_I32 = _rule("fits_i32", "does not fit the 32-bit integer the kernel indexes with")
FITS_I64 = _rule("fits_i64", "does not fit a signed 64-bit element offset")
EPS = _rule("eps", "must be finite and not negative")

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
ALIGNED = _rule("aligned", "must start on a 16-byte boundary")
SHAPE = _rule("shape", "has the wrong shape")
NO_OVERLAP = _rule("no_overlap", "shares memory with another argument while one of them is written")

# Request
Q_HEADS_MULTIPLE = _rule("q_heads_multiple", "is not a positive multiple of the KV heads")
ROTARY_DIM = _rule("rotary_dim", "must be even, at least 2 and at most head_dim")
ROPE_TABLE = _rule("rope_table", "is shorter than cos_max_pos rows of rotary_dim")
START_POS = _rule("start_pos", "must not be negative")
POSITION_RANGE = _rule("position_range", "is outside the RoPE tables")

# Page metadata
PAGE_ORIGIN = _rule("page_origin", "must not be negative or past the page of the first position")
PAGE_COVERAGE = _rule("page_coverage", "does not reach the page of every position")
PAGE_ID_RANGE = _rule("page_id_range", "names a page that the pool does not have")
PAGE_INDPTR = _rule("page_indptr", "must start at 0, never fall, and end at the number of page indices")
