"""The entries that reject cases call, prep and attention alike: a function, its form, and the head counts used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from g4kv_cli.entries import attention, prep
from g4kv_cli.entries.table import PREP_ENTRIES

RejectForm = Literal[
    "contiguous",
    "paged_prefill",
    "paged_decode",
    "paged_batch_prefill",
    "attention_prefill",
    "attention_decode",
    "attention_split",
]


@dataclass(frozen=True, slots=True)
class RejectEntry:
    """One entry. ``launches``: how many a valid call makes; ``sources`` are those its kernels are in."""

    name: str
    function: Callable[..., None]
    form: RejectForm
    head_dim: int
    geometry: str
    has_v: bool
    sources: tuple[str, ...]
    launches: int = 1

    @property
    def is_prep(self) -> bool:
        """True if it norms and rotates; else it is attention."""
        return not self.form.startswith("attention_")

    @property
    def has_pool(self) -> bool:
        """True in every paged form."""
        return self.form != "contiguous"

    @property
    def writes_pool(self) -> bool:
        """True if the pool is an output."""
        return self.is_prep and self.has_pool

    @property
    def takes_plan(self) -> bool:
        """True if the metadata is a PrefillPagedPlan."""
        return self.form == "paged_batch_prefill" or not self.is_prep

    @property
    def takes_tile(self) -> bool:
        """True if a call can name the tile of the plan."""
        return self.form in ("paged_batch_prefill", "attention_prefill")


_PREP_GEOMETRIES = {
    "qk_norm_rope_prefill_hd256_plain_into": "12b-local",
    "qkv_norm_rope_paged_prefill_hd256_plain_into": "e4b-local",
    "qkv_norm_rope_paged_decode_hd256_plain_into": "12b-local",
    "qkv_norm_rope_paged_prefill_hd512_plain_into": "e2b-global",
    "qkv_norm_rope_paged_decode_hd512_plain_into": "e4b-global",
    "qk_norm_rope_paged_prefill_hd512_k_eq_v_plain_into": "12b-global",
    "qk_norm_rope_paged_decode_hd512_k_eq_v_plain_into": "31b-global",
    "qkv_norm_rope_paged_batch_prefill_hd256_plain_into": "26b-a4b-local",
    "qkv_norm_rope_paged_batch_prefill_hd512_plain_into": "e4b-global",
    "qk_norm_rope_paged_batch_prefill_hd512_k_eq_v_plain_into": "26b-a4b-global",
}


def _prep_entries() -> list[RejectEntry]:
    return [
        RejectEntry(
            name,
            getattr(prep, name),
            entry.form,
            entry.head_dim,
            _PREP_GEOMETRIES[name],
            has_v=entry.value_source == "raw_v",
            sources=(entry.source,),
        )
        for name, entry in PREP_ENTRIES.items()
    ]


def _attention_entry(name: str, form: RejectForm, head_dim: int, geometry: str) -> RejectEntry:
    # A tile of one token's rows is the decode kernel's, whichever entry asks for it.
    return RejectEntry(
        name,
        getattr(attention, name),
        form,
        head_dim,
        geometry,
        has_v=False,
        sources=("prefill.cu", "decode.cu") if form == "attention_prefill" else ("decode.cu",),
        launches=2 if form == "attention_split" else 1,
    )


# fmt: off
REJECT_ENTRIES: dict[str, RejectEntry] = {entry.name: entry for entry in (
    *_prep_entries(),
    _attention_entry("batch_prefill_paged_window_hd256_into",      "attention_prefill", 256, "12b-local"),
    _attention_entry("batch_prefill_paged_hd512_into",             "attention_prefill", 512, "26b-a4b-global"),
    _attention_entry("batch_decode_paged_window_hd256_into",       "attention_decode",  256, "e4b-local"),
    _attention_entry("batch_decode_paged_hd512_into",              "attention_decode",  512, "12b-global"),
    _attention_entry("batch_decode_split_paged_window_hd256_into", "attention_split",   256, "26b-a4b-local"),
    _attention_entry("batch_decode_split_paged_hd512_into",        "attention_split",   512, "31b-global"),
)}
# fmt: on
