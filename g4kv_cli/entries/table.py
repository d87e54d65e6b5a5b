"""Every kernel on one screen: its entry, source, head_dim, metadata form, and where V comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Form = Literal["contiguous", "paged_prefill", "paged_decode", "paged_batch_prefill"]
ValueSource = Literal["none", "raw_v", "raw_k"]


@dataclass(frozen=True, slots=True)
class PrepEntry:
    """One prep entry. ``rows_per_warp`` are the compiled variants (few tokens, many tokens).

    ``kernel`` names the entry whose kernels it launches, where it has none of its own.
    """

    name: str
    source: str
    head_dim: int
    form: Form
    value_source: ValueSource
    rows_per_warp: tuple[int, int]
    kernel: str = ""

    @property
    def writes_v(self) -> bool:
        """True if the kernel writes V (all but the contiguous oracle form)."""
        return self.value_source != "none"

    @property
    def kv_bands(self) -> int:
        """Inputs with KV heads: K, and V where it is an input of its own."""
        return 2 if self.value_source == "raw_v" else 1

    def symbol(self, rows: int) -> str:
        """The kernel's name in the compiled image."""
        return f"{self.kernel or self.name}_rows{rows}"


_PREP = "prep.cu"
# fmt: off
PREP_ENTRIES: dict[str, PrepEntry] = {entry.name: entry for entry in (
    PrepEntry("qk_norm_rope_prefill_hd256_plain_into",                 _PREP, 256, "contiguous",    "none",  (1, 4)),
    PrepEntry("qkv_norm_rope_paged_prefill_hd256_plain_into",          _PREP, 256, "paged_prefill", "raw_v", (1, 4)),
    PrepEntry("qkv_norm_rope_paged_decode_hd256_plain_into",           _PREP, 256, "paged_decode",  "raw_v", (1, 4)),
    PrepEntry("qkv_norm_rope_paged_prefill_hd512_plain_into",          _PREP, 512, "paged_prefill", "raw_v", (1, 4)),
    PrepEntry("qkv_norm_rope_paged_decode_hd512_plain_into",           _PREP, 512, "paged_decode",  "raw_v", (1, 4)),
    PrepEntry("qk_norm_rope_paged_prefill_hd512_k_eq_v_plain_into",    _PREP, 512, "paged_prefill", "raw_k", (1, 4)),
    PrepEntry("qk_norm_rope_paged_decode_hd512_k_eq_v_plain_into",     _PREP, 512, "paged_decode",  "raw_k", (1, 4)),
    # A ragged batch by plan: the decode kernels, each token naming its request.
    PrepEntry("qkv_norm_rope_paged_batch_prefill_hd256_plain_into",    _PREP, 256, "paged_batch_prefill",
              "raw_v", (1, 4), kernel="qkv_norm_rope_paged_decode_hd256_plain_into"),
    PrepEntry("qkv_norm_rope_paged_batch_prefill_hd512_plain_into",    _PREP, 512, "paged_batch_prefill",
              "raw_v", (1, 4), kernel="qkv_norm_rope_paged_decode_hd512_plain_into"),
    PrepEntry("qk_norm_rope_paged_batch_prefill_hd512_k_eq_v_plain_into", _PREP, 512, "paged_batch_prefill",
              "raw_k", (1, 4), kernel="qk_norm_rope_paged_decode_hd512_k_eq_v_plain_into"),
)}
# fmt: on
