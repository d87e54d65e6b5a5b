"""Every entry on one screen: what it does, what it takes, and the kernels that do it, the preferred one first.

Whatever runs over entries (smoke, reject, serving, end to end, bench, reports) is driven by these rows. A kernel's
threads and bytes are those of its source, which tests compare. A new form is a row here and its kernel file, and a
function of its own only if no row has its signature yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from g4kv_cli.entries import attention_request, prep_forms
from g4kv_cli.entries.entry import Entry, KernelVariant, Metadata, Operation, Target, ValueSource
from g4kv_cli.entries.kv_boxes import BOX_SLOTS
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_format import FOLDED, SPLIT

_V = KernelVariant

_MERGE = {head_dim: (_V(f"merge_splits_hd{head_dim}", "merge.cu", 128),) for head_dim in (256, 512)}
_MERGE_AFTER = {
    head_dim: _V(f"merge_splits_after_hd{head_dim}", "merge_hopper.cu", 128, arch="sm_90a", on_request=("emulated",))
    for head_dim in (256, 512)
}


def _of_folded(symbol: str, source: str, threads: int, shared_bytes: int, tile_rows: int) -> KernelVariant:
    """A kernel for folded rows of K alone."""
    return _V(symbol, source, threads, shared_bytes, tile_rows, kv_formats=(FOLDED,))


def _alone(symbol: str, source: str, max_group: int, shared_bytes: int) -> KernelVariant:
    """A decode kernel for sm_90 whose blocks each have a request and KV head."""
    return _V(symbol, f"decode_hopper_{source}.cu", 256, shared_bytes, tile_rows=16, arch="sm_90a",
              device_kinds=("cuda",), page_multiple=16, max_group=max_group, max_cluster_blocks=1,
              alone_shared_bytes=shared_bytes, kv_formats=(FOLDED if source == "folded" else SPLIT,))  # fmt: skip


def _cluster(
    symbol: str, source: str, max_group: int, alone_bytes: int, shared_bytes: int, other: KernelVariant | None = None
) -> KernelVariant:
    """The same with blocks in clusters that share one; ``other``: the kernel of blocks that do not."""
    alone = _alone(symbol, source, max_group, shared_bytes)
    return replace(alone, max_cluster_blocks=8, alone_shared_bytes=alone_bytes, alone=other)


def _folded_prefill(kernel: KernelVariant, symbol: str, shared_bytes: int) -> KernelVariant:
    """A prefill kernel's twin for folded rows."""
    return replace(kernel, symbol=symbol, source="prefill_hopper_folded.cu", shared_bytes=shared_bytes,
                   kv_formats=(FOLDED,))  # fmt: skip


def _tile_alone(pair: KernelVariant, symbol: str) -> KernelVariant:
    """The same with tiles alone: without clusters the emulated device can run it, for calls that ask for it."""
    return replace(pair, symbol=symbol, device_kinds=("cuda", "emulated"), cluster_tiles=1, same_bits_as=pair.symbol,
                   on_request=("emulated",))  # fmt: skip


def _emulated(kernels: Sequence[KernelVariant]) -> tuple[KernelVariant, ...]:
    """GPUs' kernels as the emulated device has them: for calls that name them."""
    return tuple(replace(kernel, device_kinds=("emulated",), on_request=("emulated",)) for kernel in kernels)


# fmt: off
_ROWS_256 = (_V("batch_prefill_paged_hd256_tile64",        "prefill_hd256.cu", 128,  81920, tile_rows=64),)
_ROWS_512 = (_V("batch_prefill_paged_hd512_tile64",        "prefill_hd512.cu", 256, 205824, tile_rows=64),
             _V("batch_prefill_paged_hd512_tile64_keys32", "prefill_hd512.cu", 256, 135680, tile_rows=64),
             _V("batch_prefill_paged_hd512_tile32",        "prefill_hd512.cu", 128, 100608, tile_rows=32),
             _of_folded("batch_prefill_paged_folded_hd512_tile64",        "prefill_folded.cu", 256, 222208, 64),
             _of_folded("batch_prefill_paged_folded_hd512_tile64_keys32", "prefill_folded.cu", 256, 111104, 64),
             _of_folded("batch_prefill_paged_folded_hd512_tile32",        "prefill_folded.cu", 128,  76032, 32))
_PAIR_512 = _V("batch_prefill_paged_hd512_tile64_cluster2", "prefill_hopper_hd512.cu", 512, 230120, tile_rows=64,
               arch="sm_90a", device_kinds=("cuda",), page_multiple=BOX_SLOTS, cluster_tiles=2)
_HOPPER_512 = (_PAIR_512, _folded_prefill(_PAIR_512, "batch_prefill_paged_folded_hd512_tile64_cluster2", 230392))
_ALONE_512 = (_tile_alone(_PAIR_512,      "batch_prefill_paged_hd512_tile64_cluster1"),
              _tile_alone(_HOPPER_512[1], "batch_prefill_paged_folded_hd512_tile64_cluster1"))
_PAIRS_256 = (_V("batch_prefill_paged_hd256_tile64_pairs",     "prefill_hopper_hd256.cu", 384, 232080, tile_rows=64,
                 arch="sm_90a", page_multiple=BOX_SLOTS, resident_tiles=2, split_tiles=128, one_request_a_block=False,
                 on_request=("emulated",)),)
_KEYS_256 = (_V("paged_decode_hd256_groups4",              "decode_hd256.cu", 128,  74240, tile_rows=16),)
_KEYS_512 = (_V("paged_decode_hd512_groups4",              "decode_hd512.cu", 256, 147968, tile_rows=16),
             _V("paged_decode_hd512_groups2",              "decode_hd512.cu", 128,  82176, tile_rows=16),
             _of_folded("paged_decode_folded_hd512_groups4",       "decode_folded.cu", 256, 180736, 16),
             _of_folded("paged_decode_folded_hd512_groups2",       "decode_folded.cu", 128,  82176, 16))
_PART_256 = (_V("paged_decode_split_hd256_groups4",        "decode_hd256.cu", 128,  74240, tile_rows=16),)
_PART_512 = (_V("paged_decode_split_hd512_groups3",        "decode_hd512.cu", 192, 213376, tile_rows=16),
             _V("paged_decode_split_hd512_groups2",        "decode_hd512.cu", 128,  82176, tile_rows=16),
             _of_folded("paged_decode_split_folded_hd512_groups4", "decode_folded.cu", 256, 180736, 16),
             _of_folded("paged_decode_split_folded_hd512_groups2", "decode_folded.cu", 128,  82176, 16))
_HOPPER_KEYS_256 = (_alone("paged_decode_hopper_hd256_heads8",           "hd256",   8,  78288),
                    _alone("paged_decode_hopper_hd256_heads16",          "hd256",  16,  78672))
_HOPPER_KEYS_512 = (_alone("paged_decode_hopper_hd512_heads8",           "hd512",   8,  82224),
                    _alone("paged_decode_hopper_hd512_heads16",          "hd512",  16,  90544),
                    _alone("paged_decode_hopper_folded_hd512_heads8",    "folded",  8, 180752),
                    _alone("paged_decode_hopper_folded_hd512_heads16",   "folded", 16, 197264))
_HOPPER_PART_256 = (_cluster("paged_decode_hopper_split_hd256_heads8",   "hd256",   8, 135952, 145104),
                    _cluster("paged_decode_hopper_split_hd256_heads16",  "hd256",  16,  78672,  96976))
_HOPPER_PART_512 = (_cluster("paged_decode_hopper_split_hd512_heads8",   "hd512",   8, 147792, 165136),
                    _cluster("paged_decode_hopper_split_hd512_heads16",  "hd512",  16, 156240, 190928,
                             _HOPPER_KEYS_512[1]),
                    _cluster("paged_decode_hopper_folded_split_hd512_heads8",  "folded",  8, 180752, 198096),
                    _cluster("paged_decode_hopper_folded_split_hd512_heads16", "folded", 16, 197264, 231952))
# fmt: on


def _prep(name: str, head_dim: int, form: str, value_source: ValueSource, what: str, kernels_of: str = "") -> Entry:
    """A prep entry. Its kernels have its name, or that of the entry ``kernels_of``, and 1 or more head rows a warp.

    Where V is made of raw K there are as many for folded rows.
    """
    function, metadata = _PREP_FORMS[form]
    many = 8 if head_dim == 256 else 4
    kernels = tuple(
        _V(f"{kernels_of or name}{word}_rows{rows}", source, 256 if rows == 4 else 128, rows_per_warp=rows,
           kv_formats=(kv_format,))
        for kv_format, word, source in ((SPLIT, "", f"prep_hd{head_dim}.cu"), (FOLDED, "_folded", "prep_folded.cu"))
        if kv_format == SPLIT or value_source == "raw_k"
        for rows in (1, many)
    )  # fmt: skip
    return Entry(name, function, "prep", form, head_dim, metadata, kernels, value_source, what=what)


_PREP_FORMS: dict[str, tuple[Callable[..., None], Metadata]] = {
    "contiguous": (prep_forms.contiguous, "none"),
    "prefill": (prep_forms.paged_prefill, "page_row"),
    "decode": (prep_forms.paged_decode, "batch"),
    "batch_prefill": (prep_forms.paged_batch_prefill, "plan"),
}


def _prefill(name: str, head_dim: int, kernels: Sequence[KernelVariant], what: str) -> Entry:
    """Decode form (a) is this entry at one token a request, with the smallest tile."""
    return Entry(name, attention_request.prefill, "attention", "prefill", head_dim, "plan", tuple(kernels),
                 label="a", preference=1, what=what)  # fmt: skip


def _decode(name: str, head_dim: int, kernels: Sequence[KernelVariant], what: str) -> Entry:
    return Entry(name, attention_request.decode, "attention", "decode", head_dim, "plan", tuple(kernels),
                 one_token_each=True, label="b", what=what)  # fmt: skip


def _split(name: str, head_dim: int, kernels: Sequence[KernelVariant], what: str) -> Entry:
    return Entry(name, attention_request.decode_split, "attention", "decode-split", head_dim, "plan", tuple(kernels),
                 one_token_each=True, merge_kernels=(*_MERGE[head_dim], _MERGE_AFTER[head_dim]), label="c",
                 preference=2, what=what)  # fmt: skip


def _merge(name: str, head_dim: int, what: str) -> Entry:
    return Entry(name, attention_request.merge, "merge", "merge", head_dim, "none", _MERGE[head_dim], what=what)


_BATCH = (
    "Chunks of several requests, ragged, in one launch, by a plan: the decode kernels, each token naming its request."
)
# fmt: off
ENTRIES: tuple[Entry, ...] = (
    _prep("qk_norm_rope_prefill_hd256_plain_into", 256, "contiguous", "none",
          "Q and K to contiguous token-major outputs: the oracle form."),
    _prep("qkv_norm_rope_paged_prefill_hd256_plain_into", 256, "prefill", "raw_v",
          "One request's chunk: Q to q_out, K and V into the layer's blocks of its pages."),
    _prep("qkv_norm_rope_paged_decode_hd256_plain_into", 256, "decode", "raw_v",
          "Batched decode: each token is its own request."),
    _prep("qkv_norm_rope_paged_prefill_hd512_plain_into", 512, "prefill", "raw_v",
          "One request's chunk at head_dim 512 with a V projection of its own (E2B, E4B)."),
    _prep("qkv_norm_rope_paged_decode_hd512_plain_into", 512, "decode", "raw_v",
          "Batched decode at head_dim 512 with a V projection of its own (E2B, E4B)."),
    _prep("qk_norm_rope_paged_prefill_hd512_k_eq_v_plain_into", 512, "prefill", "raw_k",
          "One request's chunk of K=V layers (12B, 26B-A4B, 31B): V is the same raw K, normed without weight or turn."),
    _prep("qk_norm_rope_paged_decode_hd512_k_eq_v_plain_into", 512, "decode", "raw_k",
          "Batched decode of K=V layers (12B, 26B-A4B, 31B)."),
    _prep("qkv_norm_rope_paged_batch_prefill_hd256_plain_into", 256, "batch_prefill", "raw_v", _BATCH,
          "qkv_norm_rope_paged_decode_hd256_plain_into"),
    _prep("qkv_norm_rope_paged_batch_prefill_hd512_plain_into", 512, "batch_prefill", "raw_v", _BATCH,
          "qkv_norm_rope_paged_decode_hd512_plain_into"),
    _prep("qk_norm_rope_paged_batch_prefill_hd512_k_eq_v_plain_into", 512, "batch_prefill", "raw_k", _BATCH,
          "qk_norm_rope_paged_decode_hd512_k_eq_v_plain_into"),
    _prefill("batch_prefill_paged_window_hd256_into", 256, (*_PAIRS_256, *_ROWS_256, *_KEYS_256),
             "A ragged batch of chunks with history, local family."),
    # Without clusters it is slower, but the emulated device can run it, to the same bits.
    _prefill("batch_prefill_paged_hd512_into", 512, (*_HOPPER_512, *_ROWS_512, *_ALONE_512, *_KEYS_512),
             "A ragged batch of chunks with history, global family."),
    _decode("batch_decode_paged_window_hd256_into", 256, (*_HOPPER_KEYS_256, *_KEYS_256, *_emulated(_HOPPER_KEYS_256)),
            "Every request has one new token, local family."),
    _decode("batch_decode_paged_hd512_into", 512, (*_HOPPER_KEYS_512, *_KEYS_512, *_emulated(_HOPPER_KEYS_512)),
            "Every request has one new token, global family."),
    _split("batch_decode_split_paged_window_hd256_into", 256,
           (*_HOPPER_PART_256, *_PART_256, *_emulated(_HOPPER_PART_256)),
           "Each request's visible keys in num_splits chunks of whole 16-key tiles, merged; local family."),
    _split("batch_decode_split_paged_hd512_into", 512, (*_HOPPER_PART_512, *_PART_512, *_emulated(_HOPPER_PART_512)),
           "Each request's visible keys in num_splits chunks of whole 16-key tiles, merged; global family."),
    _merge("merge_splits_hd256_into", 256, "The splits' partial results as one, local family."),
    _merge("merge_splits_hd512_into", 512, "The splits' partial results as one, global family."),
)
# fmt: on


def entries(operation: Operation | None = None, *, head_dim: int | None = None) -> list[Entry]:
    """The rows of an operation and head_dim, in the table's order; None is any."""
    return [entry for entry in ENTRIES if operation in (None, entry.operation) and head_dim in (None, entry.head_dim)]


def entries_for(geometry: Geometry, operation: Operation | None = None) -> list[Entry]:
    """The rows that layers of a geometry can call."""
    return [entry for entry in entries(operation) if entry.serves(geometry)]


def entry_for(geometry: Geometry, operation: Operation, form: str) -> Entry:
    """The row that serves a geometry in a form. UsageError where there is none (contiguous at head_dim 512)."""
    found = [entry for entry in entries_for(geometry, operation) if entry.form == form]
    if not found:
        raise UsageError(f"no {operation} entry for head_dim {geometry.head_dim} in the {form} form")
    return found[0]


def require_served(geometry: Geometry) -> None:
    """Raises UsageError for a geometry that no compiled kernel serves, with what is compiled."""
    prep = entries("prep")
    own = [entry for entry in prep if entry.has_pool and entry.serves(geometry)]
    if not own:
        values = "K = V" if geometry.k_eq_v else "a V of its own"
        known = dict.fromkeys(
            f"{entry.head_dim} with {'K = V' if entry.value_source == 'raw_k' else 'a V of its own'}"
            for entry in prep
            if entry.has_pool
        )
        raise UsageError(
            f"{geometry.name}: no kernel writes the pool at head_dim {geometry.head_dim} with {values}: compiled are "
            f"{', '.join(known)}"
        )
    largest = attention_request.MAX_GQA_GROUP
    if geometry.gqa_group > largest:
        raise UsageError(
            f"{geometry.name}: {geometry.num_qo_heads} query heads on {geometry.num_kv_heads} KV heads are groups of "
            f"{geometry.gqa_group}, and no attention kernel takes them: compiled are groups of 1 to {largest}"
        )


def entry_named(name: str) -> Entry:
    """The row of this name. KeyError if there is none."""
    for entry in ENTRIES:
        if entry.name == name:
            return entry
    raise KeyError(name)


def decode_entries(geometry: Geometry) -> list[Entry]:
    """The decode forms of a geometry: attention rows with a label, in the order of the labels."""
    return sorted((entry for entry in entries_for(geometry, "attention") if entry.label), key=lambda entry: entry.label)


def decode_entry(geometry: Geometry, label: str) -> Entry:
    """A decode form by its label; the preferred one where the family has none of that label."""
    forms = decode_entries(geometry)
    return next((entry for entry in forms if entry.label == label), min(forms, key=lambda entry: entry.preference))


def decode_forms() -> list[Entry]:
    """One row of each decode form, for what its families share (label, splits, preference), in the labels' order."""
    return sorted({entry.label: entry for entry in ENTRIES if entry.label}.values(), key=lambda entry: entry.label)


def preferred_unsplit() -> str:
    """The label of the decode form to take where keys are not split."""
    return min((form for form in decode_forms() if not form.takes_splits), key=lambda form: form.preference).label


def sources_of(rows: Iterable[Entry]) -> tuple[str, ...]:
    """The translation units that calls of these entries may launch from."""
    return tuple(dict.fromkeys(source for entry in rows for source in entry.sources))


def kernel_variants() -> dict[str, KernelVariant]:
    """Every kernel of the table by its symbol."""
    return {kernel.symbol: kernel for entry in ENTRIES for kernel in (*entry.kernels, *entry.merge_kernels)}


def arithmetic_of(symbols: Iterable[str]) -> frozenset[str]:
    """What decides the bits that launches of these kernels leave: one name for all that give the same."""
    known = kernel_variants()
    return frozenset(known[symbol].same_bits_as or symbol if symbol in known else symbol for symbol in symbols)


def prefill_tiles(head_dim: int, target: Target) -> tuple[int, ...]:
    """The cta_tile_q that the device can run, smallest first.

    The smallest is the key-parallel kernel's: the prefill entry at one token a request is decode form (a).
    """
    return tuple(
        sorted(
            {
                kernel.tile_rows
                for entry in entries("attention", head_dim=head_dim)
                if entry.takes_tile
                for kernel in entry.kernels
                if not kernel.lacking(target)
            }
        )
    )


def preferred_tiles(head_dim: int, target: Target, page_size: int) -> tuple[int, ...]:
    """The same in the order in which a plan tries them: smallest first, but behind the others those, less the smallest,
    that have no kernel made for the device where a larger one has.

    On an H200 at head_dim 512, 32 requests of 32 rows behind 4096 keys (31b-global) take 262 us in tiles of 64, 337 us
    in tiles of 32 and 350 us in tiles of 16; 16 of 32 rows behind 8192 (12b-global) 242, 623 and 304 us.
    """
    tiles = prefill_tiles(head_dim, target)
    made = {
        kernel.tile_rows
        for entry in entries("attention", head_dim=head_dim)
        if entry.takes_tile
        for kernel in entry.kernels
        if kernel.arch
        and target.kind not in kernel.on_request
        and not (kernel.lacking(target) or kernel.refuses(page_size, None, None))
    }
    last = [tile for tile in tiles[1:] if tile not in made and tile < max(made, default=0)]
    return (*(tile for tile in tiles if tile not in last), *last)
