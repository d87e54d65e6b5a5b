"""Faults of the sm_90 decode kernels, for the emulated device and for a GPU: exact replacements of text.

As in test_attention_faults.py they run through ``g4kv smoke --kernels``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from g4kv_cli.compiler.sources import BUILT_IN_KERNELS_DIRECTORY

SOURCES = tuple(f"decode_hopper_{part}.cuh" for part in ("body", "loops", "merge", "ring", "shape", "tile"))
LOCAL, GLOBAL = "attention/12b-local", "attention/12b-global"


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in the one header that has it; each of ``cases`` goes red."""

    name: str
    old: str
    new: str
    cases: tuple[str, ...]
    on_gpu: Literal["failed", "error", "luck"] = "failed"
    """What a GPU makes of them: ``error`` where the kernel does not end, ``luck`` where they may well pass (a race)."""

    @property
    def options(self) -> tuple[str, ...]:
        """What ``g4kv smoke`` needs beside the cases: they are all of one format."""
        return ("--kv-format", "folded") if "/folded/" in self.cases[0] else ()

    @property
    def quick_cases(self) -> tuple[str, ...]:
        """Those that the emulated device runs in seconds: not thousands of clusters, nor of keys spread over some."""
        return tuple(case for case in self.cases if "kv-sweep" not in case and "split/long-history" not in case)

    def overlay(self, directory: Path) -> Path:
        """A directory with the header that has the fault."""
        texts = {name: (BUILT_IN_KERNELS_DIRECTORY / name).read_text(encoding="utf-8") for name in SOURCES}
        found = [name for name, text in texts.items() for _ in range(text.count(self.old))]
        if len(found) != 1:
            raise ValueError(f"{self.name}: the text to replace stands {len(found)} times in {', '.join(SOURCES)}")
        kernels = directory / "kernels"
        kernels.mkdir()
        (kernels / found[0]).write_text(texts[found[0]].replace(self.old, self.new), encoding="utf-8")
        return kernels


FAULTS = (
    Fault(
        "newest key read while the launch in front writes it",
        "tile < min(work.last_tile, work.newest_tile)) copy_tile(lane);",
        "tile < work.last_tile) copy_tile(lane);",
        ("serve/12b-local/window1024", "serve/12b-global/interleaved/page16"),
        on_gpu="luck",
    ),
    Fault(
        "queries read while the launch in front writes them",
        "  wait_for_launch_before();\n",
        "",
        ("serve/12b-local/window1024", "serve/12b-global/interleaved/page16"),
        on_gpu="luck",
    ),
    Fault(
        "queries asked for before the launch in front has ended",
        "  if (early) ask_queries",
        "  ask_queries",
        ("serve/12b-local/window1024", "serve/12b-global/interleaved/page16"),
        on_gpu="luck",
    ),
    Fault(
        "queries not waited for",
        "  wait_copies<0>();\n",
        "",
        (f"{LOCAL}/decode/ragged", f"{GLOBAL}/decode/ragged"),
        on_gpu="luck",
    ),
    Fault(
        "queries read before the other warps have theirs",
        "  __syncthreads();  // the queries are there for all warps\n",
        "",
        (f"{LOCAL}/decode/ragged", f"{GLOBAL}/decode/ragged"),
        on_gpu="luck",
    ),
    Fault(
        "values not waited for",
        "    barrier_wait(ring.values_full(stage), parity);\n",
        "",
        (f"{LOCAL}/decode/needle/window40",),
    ),
    Fault(
        "scores read before the other warps wrote them",
        "    sync_team<kTeamWarps>(own.team);\n    add_parts",
        "    add_parts",
        (f"{LOCAL}/decode/needle/window40",),
        on_gpu="luck",
    ),
    Fault(
        "window one less",
        "max(0, kv_len - 1 - p.window_left);",
        "max(0, kv_len - p.window_left);",
        (f"{LOCAL}/decode/needle/window40", f"{LOCAL}/decode-split/needle/window333"),
    ),
    Fault(
        "one key past the last",
        "  work.end = p.kv_lens[work.request];",
        "  work.end = p.kv_lens[work.request] + (p.kv_lens[work.request] % 16 != 0);",
        (f"{LOCAL}/decode/needle/window40", f"{GLOBAL}/decode/needle/causal"),
    ),
    Fault(
        "stale page",
        "    newest.page = __shfl_sync(kAllLanes, places.page, asked % kWarpSize);\n",
        "",
        (f"{LOCAL}/decode/page-size/64",),
    ),
    Fault(
        "the first 32 pages again",
        "      places = later_places;\n",
        "",
        tuple(f"{at}/{form}/long-history" for at in (LOCAL, GLOBAL) for form in ("decode", "decode-split")),
    ),
    Fault(
        "origin left out",
        "  work.page_row -= work.origin;\n",
        "",
        (f"{LOCAL}/decode/needle/window40",),
    ),
    Fault(
        "slot of the page's first tile",
        "    place.slot = (tile - logical_page * work.tiles_per_page) * kClusterTileKeys;",
        "    place.slot = 0;",
        (f"{LOCAL}/decode/page-size/64", f"{GLOBAL}/decode/page-size/64"),
    ),
    Fault(
        "first layer",
        "p.layer * 2 + is_value",
        "is_value",
        (f"{LOCAL}/decode/ragged", f"{GLOBAL}/decode-split/ragged"),
    ),
    Fault(
        "unwritten slots weighed by zero",
        "if ((key < begin || key >= end) && lane < kWarpColumns / 8) {",
        "if (false) {",
        (f"{LOCAL}/decode/needle/window40", f"{GLOBAL}/decode/ragged"),
    ),
    Fault(
        "the other head's weight in the merge",
        "merged.y = fmaf(part.y, factor[source][1], merged.y);",
        "merged.y = fmaf(part.y, factor[source][0], merged.y);",
        (f"{LOCAL}/decode/needle/window40",),
    ),
    Fault(
        "sum of one part",
        "        sum[source][head] *= factor[source][head];",
        "        sum[source][head] *= source == 0 ? factor[source][head] : 0.0f;",
        (f"{LOCAL}/decode/needle/window40",),
    ),
    Fault(
        "last dims of the last block not written",
        "own < own_pairs; own +=",
        "own < own_pairs - (rank == ranks - 1); own +=",
        (f"{LOCAL}/decode-split/needle/window333",),
    ),
    Fault(
        "one place for all clusters' partial results",
        "(row * p.num_splits + work.split) * kHeadDim",
        "(row * p.num_splits) * kHeadDim",
        (f"{LOCAL}/decode-split/kv-sweep/1-200/splits16",),
    ),
    Fault(
        "one place for all partial results of blocks alone",
        "const long long partial = row * p.num_splits + work.split;",
        "const long long partial = row * p.num_splits;",
        (f"{GLOBAL}/decode-split/splits/more-than-pages",),
    ),
    Fault(
        "the other blocks' results not waited for",
        "  barrier_wait(received, 0);  // of all warps",
        "  // of all warps",
        (f"{LOCAL}/decode-split/needle/window333",),
    ),
    Fault(
        "pushed before the cluster had met",
        "    if (ranks > 1) cluster_wait();  // from here on",
        "    // from here on",
        (f"{LOCAL}/decode-split/needle/window333",),
        on_gpu="luck",
    ),
    Fault(
        "one block's results too many awaited",
        "barrier_expect(received, active_ranks * (own_pairs + 1) * pairs * 16);",
        "barrier_expect(received, (active_ranks + 1) * (own_pairs + 1) * pairs * 16);",
        (f"{LOCAL}/decode-split/needle/window333",),
        on_gpu="error",
    ),
    Fault(
        "a slice too far",
        "const int to = dim_pair * slice_inverse >> 16;",
        "const int to = (dim_pair * slice_inverse >> 16) + 1;",
        (f"{LOCAL}/decode-split/needle/window333",),
    ),
    Fault(
        "folded: rotated columns of V",
        "first_column % kHalf == 0 ?",
        "false ?",
        (f"{GLOBAL}/decode/folded/ragged",),
    ),
    Fault(
        "folded: both halves of the first half's K",
        "first_column / kHalf * kBlockBytes",
        "0",
        (f"{GLOBAL}/decode/folded/ragged",),
    ),
    Fault(
        "folded: first layer",
        "Shape::kFolded ? p.layer :",
        "Shape::kFolded ? 0 :",
        (f"{GLOBAL}/decode/folded/ragged",),
    ),
    Fault(
        "folded: unwritten slots weighed by zero",
        "      own.template silence<kTiles>(shared, ring, stage, tile);\n",
        "",
        (f"{GLOBAL}/decode/folded/ragged",),
    ),
    Fault(
        "folded: second tile of a step not awaited",
        "      barrier_wait(ring.keys_full(stage + i), parity);",
        "      barrier_wait(ring.keys_full(stage), parity);",
        (f"{GLOBAL}/decode/folded/ragged",),
        on_gpu="luck",
    ),
    Fault(
        "folded: first tile's weights for the second",
        "weights_as_b(weights[i], scores[i]);",
        "weights_as_b(weights[i], scores[0]);",
        (f"{GLOBAL}/decode/folded/ragged",),
    ),
    Fault(
        "folded: odd tile left out",
        "    if (tile < ring.work.last_tile) tiles.template step<1>(tile);\n",
        "",
        (f"{GLOBAL}/decode/folded/ragged",),
    ),
    Fault(
        "folded: scores exchanged where others still read",
        "    buffer ^= 1;\n    const int first_key = tile * kClusterTileKeys, key_step",
        "    const int first_key = tile * kClusterTileKeys, key_step",
        (f"{GLOBAL}/decode/folded/page-size/256",),
        on_gpu="luck",
    ),
    Fault(
        "folded: tile replaced while the team reads it",
        "      release_values<Shape::kTeamWarps>(Shape::kTeams + own.team + 1, own.fills);\n#pragma",
        "#pragma",
        (f"{GLOBAL}/decode/folded/page-size/256",),
        on_gpu="luck",
    ),
)
