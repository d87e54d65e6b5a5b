"""Which problem sizes and which configurations a run measures, and what each has to move and to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from g4kv_cli.entries.clusters import WHOLE_CARD_SPLITS
from g4kv_cli.entries.entry import Entry, Target
from g4kv_cli.entries.table import decode_entries, entries_for, entry_for, entry_named, preferred_tiles
from g4kv_cli.errors import UsageError
from g4kv_cli.model import workload as asked
from g4kv_cli.model.geometry import ATTENTION_SCALE, Geometry
from g4kv_cli.model.kv_format import FOLDED, SPLIT, KvFormat, k_dim_of
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS
from g4kv_cli.records.bench import Shape

Workload = Literal["decode", "prefill", "prep", "all"]
Preset = Literal["quick", "decode-forms", "full"]

MAX_PRESET_TOKENS = 2**23
"""Global keys of a preset's batch at most: 64 requests of 131072. ``--batch`` and ``--kv-len`` ask for any."""
ELEMENT_BYTES = 2

SPLIT_COUNTS = (2, 4, 6, 8, 16, 32, 64, WHOLE_CARD_SPLITS, 128)
"""Powers of two; 6: of clusters of 6, more blocks fit on a Hopper card than of 4 or 8; and clusters all over it."""
MIN_SPLIT_BLOCKS, MAX_SPLIT_BLOCKS = 16, 512
"""Blocks (requests x KV heads x splits) outside of this range leave most of a card idle, or pay for merging."""
MIN_KEYS_PER_SPLIT = 16
SHORT_SPLIT_KEYS = 32
"""Splits of so few keys are tried however few blocks they make: a short history has no more of them."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A configuration of ours at a shape. ``form``: the label of a decode form; else the tile or the entry's name."""

    name: str
    form: str
    entry: str
    num_splits: int = 1
    tile: int = 0
    enable_pdl: bool = False


_DECODE_BATCHES: dict[Preset, tuple[int, ...]] = {
    "quick": (1, 16, 128),
    "decode-forms": (1, 4, 16, 64, 256),
    "full": (1, 2, 4, 8, 16, 32, 64, 128, 256),
}
_DECODE_KV: dict[Preset, dict[str, tuple[int, ...]]] = {
    "quick": {"local": (128, 1024), "global": (1024, 8192)},
    "decode-forms": {"local": (128, 512, 1024, 8192), "global": (128, 1024, 8192, 32768, 131072)},
    "full": {
        "local": (128, 256, 512, 1024, 2048, 8192, 131072),
        "global": (128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
    },
}
_PREFILL: dict[Preset, tuple[tuple[int, int], ...]] = {
    "quick": ((512, 0), (512, 8192)),
    "decode-forms": ((128, 8192), (512, 8192), (512, 32768), (8192, 0), (8192, 32768)),
    "full": ((128, 8192), (512, 0), (512, 8192), (512, 32768), (2048, 8192), (8192, 0), (8192, 8192), (8192, 32768)),
}
"""(new tokens of the chunk, tokens of history)."""
_MIXED: dict[Preset, tuple[tuple[int, int, int], ...]] = {
    "quick": ((64, 8192, 32),),
    "decode-forms": ((2, 8192, 32), (16, 8192, 32), (64, 8192, 32), (256, 8192, 32)),
    "full": tuple((chunk, history, 32) for history in (1024, 8192, 32768) for chunk in (2, 4, 16, 64, 128, 256)),
}
"""(new tokens of the chunk, tokens of history, requests beside it that decode behind as many)."""
_PREP_TOKENS: dict[Preset, tuple[int, ...]] = {
    "quick": (1, 64, 8192),
    "decode-forms": (1, 64, 8192),
    "full": (1, 4, 16, 64, 256, 1024, 4096, 8192),
}


def shapes_of(workload: Workload, geometry: Geometry, preset: Preset, kv_format: KvFormat = SPLIT) -> list[Shape]:
    """The shapes of a workload, in the order of the run; of folded rows prep's are those of entries that write them."""
    found: list[Shape] = []
    if workload in ("decode", "all"):
        batches, lengths = _DECODE_BATCHES[preset], _DECODE_KV[preset][geometry.family]
        found += [
            decode_shape(geometry, batch, kv_len, kv_format)
            for kv_len in lengths
            for batch in batches
            if kv_len <= geometry.max_positions and (geometry.window is not None or batch * kv_len <= MAX_PRESET_TOKENS)
        ]
    if workload in ("prefill", "all"):
        found += [
            prefill_shape(geometry, chunk, history, kv_format)
            for chunk, history in _PREFILL[preset]
            if chunk + history <= geometry.max_positions
        ]
    if workload in ("prep", "all"):
        writing = [entry for entry in entries_for(geometry, "prep") if kv_format in entry.kv_formats]
        found += [prep_shape(geometry, entry, tokens, kv_format) for entry in writing for tokens in
                  _PREP_TOKENS[preset] if tokens <= geometry.max_positions]  # fmt: skip
    return found


def with_pages(shape: Shape, page_size: int) -> Shape:
    """The same problem on pages of so many tokens, of another id where they are not the usual ones."""
    return (
        shape
        if page_size == shape.page_size
        else replace(shape, id=f"{shape.id}{_page_suffix(page_size)}", page_size=page_size)
    )


def _page_suffix(page_size: int) -> str:
    return "" if page_size == DEFAULT_PAGE_SIZE_TOKENS else f"/page{page_size}"


def mixed_batches(
    geometry: Geometry, preset: Preset, page_size: int = DEFAULT_PAGE_SIZE_TOKENS
) -> list[asked.Workload]:
    """Batches of a server's step: a chunk of one request's prompt, and requests that decode one token each."""
    return [
        mixed_batch(geometry, chunk, history, decoding, page_size)
        for chunk, history, decoding in _MIXED[preset]
        if chunk + history <= geometry.max_positions
    ]


def mixed_batch(
    geometry: Geometry, chunk: int, history: int, decoding: int, page_size: int = DEFAULT_PAGE_SIZE_TOKENS
) -> asked.Workload:
    """A request of ``chunk`` new tokens and ``decoding`` of one, each behind ``history`` tokens, on permuted pages."""

    def fault(key: str, words: str) -> UsageError:
        return UsageError(f"{geometry.name}, a chunk of {chunk} behind {history}: {key}: {words}")

    lengths = [(history + chunk, chunk), *[(history + 1, 1)] * decoding]
    spec = asked.WorkloadSpec(
        name=f"chunk{chunk}+decode{decoding}/history{history}{_page_suffix(page_size)}",
        requests=tuple(asked.RequestSpec(kv_len, q_len, "permuted", None, fault) for kv_len, q_len in lengths),
        page_size=page_size,
        splits=asked.DEFAULT_SPLITS,
        padding=0,
        released=True,
        page_seed=chunk,
        num_pages=None,
        num_layers=1,
        sm_scale=ATTENTION_SCALE,
        values=None,
        fault=fault,
    )
    return asked.lay_out(spec, geometry)


def decode_shape(geometry: Geometry, batch: int, kv_len: int, kv_format: KvFormat = SPLIT) -> Shape:
    """``batch`` requests of ``kv_len`` keys, one query token each."""
    visible = kv_len if geometry.window is None else min(kv_len, geometry.window)
    name = f"batch{batch}/kv{kv_len}"
    return _attention_shape(geometry, "decode", name, batch, 1, kv_len, visible, visible, kv_format)


def prefill_shape(geometry: Geometry, chunk: int, history: int, kv_format: KvFormat = SPLIT) -> Shape:
    """One request: ``chunk`` new tokens on top of ``history`` tokens."""
    kv_len, window = chunk + history, geometry.window
    visible = kv_len if window is None else min(kv_len, window - 1 + chunk)
    if window is None:
        pairs = chunk * history + chunk * (chunk + 1) // 2
    else:
        # The token at position p sees min(p + 1, window) keys.
        growing = max(0, min(chunk, window - 1 - history))
        pairs = growing * history + growing * (growing + 1) // 2 + (chunk - growing) * window
    name = f"chunk{chunk}/history{history}"
    return _attention_shape(geometry, "prefill", name, 1, chunk, kv_len, visible, pairs, kv_format)


def workload_shape(workload: asked.Workload) -> Shape:
    """The batch of a workload: each request's own keys and rows; ``kv_len``, ``tokens`` and ``visible_keys`` are the
    largest of them."""
    geometry, requests = workload.geometry, workload.requests
    visible, pairs = [], workload.padding
    for request in requests:
        first = 0 if geometry.window is None else max(0, request.start_pos - geometry.window_left)
        visible.append(request.kv_len - first if request.q_len else 0)
        seen = range(request.start_pos + 1, request.kv_len + 1)
        pairs += sum(seen) if geometry.window is None else sum(min(keys, geometry.window) for keys in seen)
    kind: Literal["decode", "prefill"] = "decode" if workload.one_token_each else "prefill"
    heads, head_dim = geometry.num_qo_heads, geometry.head_dim
    row_bytes = (workload.num_tokens + workload.padding) * heads * head_dim * ELEMENT_BYTES
    key_bytes = 2 * geometry.num_kv_heads * head_dim * ELEMENT_BYTES
    return Shape(
        id=f"{kind}/{geometry.name}/{workload.name}",
        kind=kind,
        geometry=geometry.name,
        family=geometry.family,
        batch=len(requests) + workload.padding,
        tokens=max(request.q_len for request in requests),
        kv_len=max(request.kv_len for request in requests),
        visible_keys=max(visible),
        page_size=workload.page_size,
        num_qo_heads=heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=head_dim,
        read_bytes=(sum(visible) + workload.padding) * key_bytes + row_bytes,
        write_bytes=row_bytes,
        flops=4 * head_dim * heads * pairs,
        requests=tuple((request.kv_len, request.q_len) for request in requests),
    )


def _attention_shape(
    geometry: Geometry,
    kind: Literal["decode", "prefill"],
    name: str,
    batch: int,
    tokens: int,
    kv_len: int,
    visible: int,
    pairs: int,
    kv_format: KvFormat,
) -> Shape:
    """K and V of the visible keys and Q read once, the output written once; two products of head_dim a pair."""
    head_dim, heads = geometry.head_dim, geometry.num_qo_heads
    row_bytes = batch * tokens * heads * head_dim * ELEMENT_BYTES
    kv_bytes = batch * visible * geometry.num_kv_heads * (k_dim_of(geometry, kv_format) + head_dim) * ELEMENT_BYTES
    shape = Shape(
        id="",
        kind=kind,
        geometry=geometry.name,
        family=geometry.family,
        batch=batch,
        tokens=tokens,
        kv_len=kv_len,
        visible_keys=visible,
        page_size=DEFAULT_PAGE_SIZE_TOKENS,
        num_qo_heads=heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=head_dim,
        read_bytes=kv_bytes + row_bytes,
        write_bytes=row_bytes,
        flops=4 * head_dim * heads * batch * pairs,
        kv_format="folded" if kv_format == FOLDED else "",
    )
    return replace(shape, id=f"{kind}/{shape.pool}/{name}")


def prep_shape(geometry: Geometry, entry: Entry, tokens: int, kv_format: KvFormat = SPLIT) -> Shape:
    """``tokens`` rows: Q, K (and V) read once and written once, V also where it is made from K; folded rows of K are
    written short."""
    q_row = geometry.num_qo_heads * geometry.head_dim * ELEMENT_BYTES
    kv_row = geometry.num_kv_heads * geometry.head_dim * ELEMENT_BYTES
    k_row = geometry.num_kv_heads * k_dim_of(geometry, kv_format) * ELEMENT_BYTES
    written_kv = k_row + (kv_row if entry.writes_v else 0)
    elements = (q_row + written_kv) // ELEMENT_BYTES
    shape = Shape(
        id="",
        kind="prep",
        geometry=geometry.name,
        family=geometry.family,
        batch=tokens if entry.metadata == "batch" else 1,
        tokens=tokens,
        kv_len=tokens,
        visible_keys=0,
        page_size=DEFAULT_PAGE_SIZE_TOKENS,
        num_qo_heads=geometry.num_qo_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        read_bytes=tokens * (q_row + entry.kv_bands * kv_row),
        write_bytes=tokens * (q_row + written_kv),
        # Square and add, two scalings, a rotation of three operations: 7 an element written, to the nearest.
        flops=7 * tokens * elements,
        kv_format="folded" if kv_format == FOLDED else "",
    )
    return replace(shape, id=f"prep/{shape.pool}/{entry.name}/tokens{tokens}")


def variants_of(
    shape: Shape, geometry: Geometry, target: Target, splits: Sequence[int] | None = None, *, enable_pdl: bool = False
) -> list[Variant]:
    """Our configurations at a shape. ``splits`` replaces the split counts that are worth a try; with ``enable_pdl``
    decode's launches may begin before those in front have ended."""
    if shape.kind == "prep":
        entry = shape.id.split("/")[2]
        return [Variant("kernel", entry, entry)]
    if shape.kind == "prefill":
        entry = entry_for(geometry, "attention", "prefill").name
        # Those that a plan would take. The smallest is the decode kernel's, also for short chunks beside decoding
        # requests.
        order = preferred_tiles(shape.head_dim, target, shape.page_size)
        tiles = [tile for at, tile in enumerate(order) if tile > max(order[:at], default=0)]
        tiles = tiles[0 if shape.requests else 1 :]
        return [Variant(f"tile{tile}", f"tile{tile}", entry, tile=tile) for tile in tiles]
    counts = splits_worth_trying(shape) if splits is None else tuple(splits)
    found = []
    for form in decode_entries(geometry):
        if form.takes_splits:
            found += [Variant(f"{form.label}{count}", form.label, form.name, num_splits=count) for count in counts]
        else:
            found.append(Variant(form.label, form.label, form.name))
    # Form (a) is the prefill entry.
    return [replace(one, enable_pdl=enable_pdl and entry_named(one.entry).takes_pdl) for one in found]


def splits_worth_trying(shape: Shape) -> tuple[int, ...]:
    """Counts that leave each split keys enough and the card blocks enough, but not far too many."""
    units = shape.batch * shape.num_kv_heads
    found = []
    for count in SPLIT_COUNTS:
        blocks, keys = units * count, shape.visible_keys // count
        enough = blocks >= MIN_SPLIT_BLOCKS or keys <= SHORT_SPLIT_KEYS
        if enough and blocks <= MAX_SPLIT_BLOCKS and keys >= MIN_KEYS_PER_SPLIT:
            found.append(count)
    return tuple(found)


def with_baseline(variants: Sequence[Variant], suffix: str) -> list[Variant]:
    """Every variant twice: ours, and the same one of the other kernels."""
    return [item for one in variants for item in (one, replace(one, name=one.name + suffix))]
