"""The plots of a bench: roofline, time against kv_len per decode form, and which form wins where (matplotlib)."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from g4kv_cli.entries.table import decode_forms
from g4kv_cli.errors import UsageError
from g4kv_cli.records.bench import BASELINE_SUFFIX, COPY
from g4kv_cli.records.files import make_directory, write_whole
from g4kv_cli.records.findings import Analysis, GeometryVerdict, Row
from g4kv_cli.report.bench_format import time_text

PIP_LINE = "python -m pip install matplotlib"

PEER = "peer"
PEER_COLOR, FLOOR_COLOR = "#2a9d5c", "#222222"
SPLIT_COLOR, UNSPLIT_COLOR, UNDECIDED_COLOR = "#d95f02", "#1f77b4", "#bbbbbb"
MORE_COLORS = ("#7f7f7f", "#9467bd", "#8c564b", "#e377c2", "#17becf")


@dataclass(frozen=True, slots=True)
class Line:
    """How a form is drawn, the same in every plot; told apart in greyscale too."""

    label: str
    color: str
    style: str


def lines_of_forms() -> dict[str, Line]:
    """The decode forms of the table and the best peer. The first unsplit and the first split form have the colors of
    the two kinds."""
    more, found = iter(itertools.cycle(MORE_COLORS)), {}
    taken: set[bool] = set()
    for form in sorted(decode_forms(), key=lambda form: form.preference):
        is_first = form.takes_splits not in taken
        taken.add(form.takes_splits)
        kind, color = ("best split", SPLIT_COLOR) if form.takes_splits else ("unsplit", UNSPLIT_COLOR)
        what = "prefill entry" if form.takes_tile else kind if is_first else form.form
        line = Line(f"{form.label}, {what}", color if is_first else next(more), "-" if is_first else ":")
        found[form.label] = line
    return {label: found[label] for label in sorted(found)} | {PEER: Line("best peer", PEER_COLOR, "--")}


@dataclass(frozen=True, slots=True)
class Plot:
    """``name`` is the file's stem; ``alt`` says in a sentence what is to be seen."""

    name: str
    title: str
    alt: str
    draw: Callable[[Any], None]


def plots_of(analysis: Analysis) -> list[Plot]:
    """The plots that the record has data for; each draws itself into an empty matplotlib figure."""
    plots: list[Plot] = []
    timed = [row for row in analysis.rows if row.measurement.graph is not None]
    if timed and analysis.record.ceilings is not None:
        plots.append(
            Plot(
                "roofline",
                "Achieved against the ceilings of this run",
                "FLOP/s over arithmetic intensity, the best of ours and the best peer at each shape, below the roofs",
                lambda figure: _roofline(figure, analysis, timed),
            )
        )
    for verdict in analysis.verdicts:
        rows = [row for row in timed if row.shape.pool == verdict.pool and row.shape.kind == "decode"]
        plots.append(
            Plot(
                f"{verdict.pool}-time",
                f"{verdict.pool}: time of a decode call",
                "Time over kv_len for each form, one panel a batch size; bands from the first to the third quartile",
                lambda figure, rows=rows: _times(figure, rows),  # type: ignore[misc]
            )
        )
        plots.append(
            Plot(
                f"{verdict.pool}-winners",
                f"{verdict.pool}: which decode form",
                "The fastest form for each batch size and kv_len, and by how much the other kind is slower",
                lambda figure, verdict=verdict: _winners(figure, verdict),  # type: ignore[misc]
            )
        )
    return plots


def missing_matplotlib() -> str:
    """What to do where matplotlib is not installed; empty where it is."""
    if find_spec("matplotlib") is not None:
        return ""
    return f"plots need matplotlib; install it with: {PIP_LINE}"


def write_plots(analysis: Analysis, directory: Path, option: str) -> list[Path]:
    """A PNG for each plot. Raises UsageError without matplotlib, or where the directory cannot be written."""
    make_directory(directory, option)
    paths = []
    for plot in plots_of(analysis):
        path = directory / f"{plot.name}.png"
        write_whole(path, render(plot, "png"), option)
        paths.append(path)
    return paths


def render(plot: Plot, kind: str) -> bytes:
    """The plot as ``png`` or ``svg``; the same record gives the same bytes. Raises UsageError without matplotlib."""
    if missing := missing_matplotlib():
        raise UsageError(missing)
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {"svg.hashsalt": "g4kv", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
                "axes.spines.right": False, "axes.titlesize": 10}  # fmt: skip
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(9.6, 4.8), layout="constrained")
        plot.draw(figure)
        stream = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(stream, format=kind, dpi=150, metadata=metadata)
    return stream.getvalue()


def _roofline(figure: Any, analysis: Analysis, rows: Sequence[Row]) -> None:
    ceilings = analysis.record.ceilings
    if ceilings is None:
        return
    axes = figure.subplots()
    shown = [row for row in rows if row.measurement.form != COPY]
    chosen = [row for row in shown if row.standing in ("best", "best peer") or row.shape.kind == "prep"]

    def intensity(row: Row) -> float:
        return row.shape.flops / (row.shape.read_bytes + row.shape.write_bytes)

    low = min(map(intensity, chosen), default=1.0) / 2
    high = max([*map(intensity, chosen), 500.0]) * 2
    roof = ceilings.gemm_flops_per_second or float("inf")
    xs = [low * (high / low) ** (step / 200) for step in range(201)]
    axes.plot(xs, [min(x * ceilings.read_bytes_per_second, roof) / 1e12 for x in xs], color=FLOOR_COLOR, lw=1.2)
    axes.annotate(
        f"read {ceilings.read_bytes_per_second / 1e12:.2f} TB/s",
        (low * 1.6, low * 1.6 * ceilings.read_bytes_per_second / 1e12),
        rotation=32, ha="left", va="bottom", fontsize=8,
    )  # fmt: skip
    if ceilings.gemm_flops_per_second:
        axes.annotate(f"bf16 GEMM {roof / 1e12:.0f} TFLOP/s", (high / 1.2, roof / 1e12), ha="right", va="bottom",
                      fontsize=8)  # fmt: skip
    markers = {"decode": "o", "prefill": "s", "prep": "^"}
    seen: set[str] = set()
    for row in chosen:
        peer = row.measurement.form == "peer"
        label = f"{row.shape.kind}, {'best peer' if peer else 'ours'}"
        seconds = row.measurement.seconds or 1.0
        axes.plot(
            intensity(row),
            row.shape.flops / seconds / 1e12,
            markers[row.shape.kind],
            color=PEER_COLOR if peer else UNSPLIT_COLOR,
            mfc="none" if peer else UNSPLIT_COLOR,
            ms=5,
            alpha=0.8,
            label=label if label not in seen else None,
        )
        seen.add(label)
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="TFLOP/s")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _times(figure: Any, rows: Sequence[Row]) -> None:
    batches = sorted({row.shape.batch for row in rows})
    panels = figure.subplots(1, max(1, len(batches)), sharey=True, squeeze=False)[0]
    for axes, batch in zip(panels, batches, strict=False):
        here = [row for row in rows if row.shape.batch == batch]
        lengths = sorted({row.shape.kv_len for row in here})
        for form, line in lines_of_forms().items():
            best = [row for row in (_fastest(here, kv_len, form) for kv_len in lengths) if row is not None]
            timings = [row.measurement.graph for row in best if row.measurement.graph is not None]
            if not timings:
                continue
            xs = [row.shape.kv_len for row in best]
            axes.plot(xs, [timing.median * 1e6 for timing in timings], line.style, color=line.color,
                      marker="o", ms=3, label=line.label, lw=1.4)  # fmt: skip
            axes.fill_between(xs, [timing.q1 * 1e6 for timing in timings], [timing.q3 * 1e6 for timing in timings],
                              color=line.color, alpha=0.25, lw=0)  # fmt: skip
        floors = [next(row.floor_seconds for row in here if row.shape.kv_len == kv_len) * 1e6 for kv_len in lengths]
        axes.plot(lengths, floors, color=FLOOR_COLOR, lw=0.8, ls=(0, (1, 2)), label="floor")
        axes.set(xscale="log", yscale="log", title=f"batch {batch}", xlabel="kv_len")
        axes.set_xticks(lengths, [_thousands(value) for value in lengths], rotation=45)
        axes.minorticks_off()
        axes.grid(visible=True, axis="y", lw=0.3)
    panels[0].set_ylabel("us a call (log)")
    panels[0].yaxis.set_major_formatter(lambda value, _place: f"{value:g}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=5, loc="outside lower center")


def _fastest(rows: Sequence[Row], kv_len: int, form: str) -> Row | None:
    found = [
        row
        for row in rows
        if row.shape.kv_len == kv_len
        and row.measurement.form == form
        and not row.measurement.configuration.endswith(BASELINE_SUFFIX)
    ]
    return min(found, key=lambda row: row.measurement.seconds or float("inf"), default=None)


def _winners(figure: Any, verdict: GeometryVerdict) -> None:
    axes = figure.subplots()
    batches = sorted({cell.shape.batch for cell in verdict.cells})
    lengths = sorted({cell.shape.kv_len for cell in verdict.cells})
    for cell in verdict.cells:
        x, y = batches.index(cell.shape.batch), lengths.index(cell.shape.kv_len)
        strength = 0.25 + 0.75 * min(1.0, (cell.margin or 0.0) / 0.5)
        color, alpha = SPLIT_COLOR if cell.is_split else UNSPLIT_COLOR, strength
        if not cell.decided:
            color, alpha = UNDECIDED_COLOR, 0.6
        axes.add_patch(_square(x, y, color, alpha))
        text = cell.configuration if cell.decided else f"~{cell.configuration}"
        lines = [text, time_text(cell.seconds)]
        if cell.decided and cell.margin is not None:
            lines.append(f"other +{100 * cell.margin:.0f} %")
        if cell.peer_seconds is not None:
            lines.append(f"peer {cell.peer_seconds / cell.seconds:.2f}x")
        axes.text(x, y, "\n".join(lines), ha="center", va="center", fontsize=8)
    axes.set(xlim=(-0.5, len(batches) - 0.5), ylim=(len(lengths) - 0.5, -0.5), xlabel="batch", ylabel="kv_len")
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_yticks(range(len(lengths)), [_thousands(value) for value in lengths])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title("orange: split; blue: unsplit; grey ~: undecided; the stronger, the larger the margin",
                   fontsize=8, loc="left")  # fmt: skip


def _square(x: int, y: int, color: str, alpha: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, facecolor=color, alpha=alpha * 0.7, lw=0)


def _thousands(value: int) -> str:
    return f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else str(value)
