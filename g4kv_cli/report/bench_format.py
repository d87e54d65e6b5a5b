"""Times, rates and shares of a bench as people read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from g4kv_cli.records.bench import BenchRecord, Ceilings, Timing
from g4kv_cli.records.findings import Row


def time_text(seconds: float) -> str:
    """``0.68 us``, ``131.6 us``, ``3.75 ms``: three or four significant digits."""
    if seconds < 1e-3:
        microseconds = seconds * 1e6
        return f"{microseconds:.2f} us" if microseconds < 100 else f"{microseconds:.1f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds:.2f} s"


def share_text(share: float) -> str:
    """``97 %``, ``5.6 %``."""
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 9.95 else f"{percent:.1f} %"


def signed_share_text(share: float) -> str:
    """``+8.1 %``, ``-0.3 %``."""
    return f"{100 * share:+.1f} %"


def rate_text(rate: float, kind: str) -> str:
    """``4250 GB/s`` or ``521 TFLOP/s``; empty without a time."""
    if not rate:
        return ""
    return f"{rate / 1e9:.0f} GB/s" if kind == "bytes" else f"{rate / 1e12:.0f} TFLOP/s"


def clock_text(hertz: float | None) -> str:
    """``1755 MHz``; empty without one."""
    return f"{hertz / 1e6:.0f} MHz" if hertz else ""


@dataclass(frozen=True, slots=True)
class Column:
    """A number of a measurement; ``text`` is empty where it has none."""

    name: str
    text: Callable[[Row], str]


COLUMNS = (
    Column("time", lambda row: _median(row.measurement.graph)),
    Column("+-", lambda row: _noise(row.measurement.graph)),
    Column("rate", lambda row: rate_text(row.rate, row.rate_kind)),
    Column("of ceiling", lambda row: share_text(row.ceiling_share) if row.rate else ""),
    Column("of copy", lambda row: f"{100 * row.copy_share:.1f} %" if row.copy_share else ""),
    Column("x floor", lambda row: f"{row.over_floor:.2f}" if row.rate else ""),
    Column("clock", lambda row: _clock(row.measurement.graph)),
    Column("burst", lambda row: _median(row.measurement.burst)),
    Column("burst +-", lambda row: _noise(row.measurement.burst)),
    Column("burst rate", lambda row: rate_text(row.burst_rate, row.rate_kind)),
    Column("burst of ceiling", lambda row: share_text(row.burst_share) if row.burst_rate else ""),
    Column("burst clock", lambda row: _clock(row.measurement.burst)),
    Column("cold", lambda row: _median(row.measurement.cold)),
    Column("warm", lambda row: "" if row.measurement.warm_seconds is None else time_text(row.measurement.warm_seconds)),
)
_RARE = ("of copy", "clock", "burst", "burst +-", "burst rate", "burst of ceiling", "burst clock")
"""Left out of a table none of whose rows has them."""


def columns_of(rows: Sequence[Row]) -> tuple[Column, ...]:
    """The columns of a table of these rows."""
    return tuple(one for one in COLUMNS if one.name not in _RARE or any(one.text(row) for row in rows))


def _median(timing: Timing | None) -> str:
    return "" if timing is None else time_text(timing.median)


def _noise(timing: Timing | None) -> str:
    return "" if timing is None else share_text(timing.noise)


def _clock(timing: Timing | None) -> str:
    return "" if timing is None else clock_text(timing.clock_hz)


def bytes_text(count: int) -> str:
    """``512 B``, ``16.8 MB``, ``68.7 GB`` (powers of ten, as rates are)."""
    value, units = float(count), ("B", "kB", "MB", "GB", "TB")
    for unit in units:
        if value < 1000 or unit == units[-1]:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
        value /= 1000
    return ""


def flops_text(count: int) -> str:
    """``2.1 GFLOP``."""
    value, units = float(count), ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")
    for unit in units:
        if value < 1000 or unit == units[-1]:
            return f"{value:.0f} {unit}" if unit == "FLOP" else f"{value:.1f} {unit}"
        value /= 1000
    return ""


def ceilings_text(ceilings: Ceilings) -> str:
    """One line of everything that was measured."""
    parts = [
        f"read {ceilings.read_bytes_per_second / 1e9:.0f} GB/s",
        f"copy {ceilings.copy_bytes_per_second / 1e9:.0f} GB/s",
    ]
    if ceilings.gemm_flops_per_second:
        clock = f" at {clock_text(ceilings.gemm_clock_hz)}" if ceilings.gemm_clock_hz else ""
        parts.append(f"bf16 GEMM {ceilings.gemm_flops_per_second / 1e12:.0f} TFLOP/s{clock}")
    if ceilings.launch_seconds:
        parts.append(f"empty launch {time_text(ceilings.launch_seconds)}")
    return ", ".join(parts)


def burst_text(record: BenchRecord) -> str:
    """The ceilings in bursts, and what a burst is; empty where the run had none."""
    if record.burst_ceilings is None:
        return ""
    return f"{ceilings_text(record.burst_ceilings)} ({record.burst_ceilings.note})"


_CLOCK_EVENTS = {
    0x1: "idle",
    0x2: "clocks set by an application",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
    0x100: "clocks set for a display",
}
"""What holds the clocks down: NVML's nvmlClocksEventReason bits."""


def clocks_text(line: str) -> str:
    """``SM 1980 MHz, memory 3201 MHz, 127.14 W, 35 degrees C, clocks held down by nothing`` of nvidia-smi's line in a
    record; a line of another form as it is."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 5:
        return line
    sm, memory, power, heat, reasons = parts
    try:
        bits = int(reasons, 16)
    except ValueError:
        return line
    named = [name for bit, name in _CLOCK_EVENTS.items() if bits & bit]
    rest = bits & ~sum(_CLOCK_EVENTS)
    named += [f"0x{rest:x}"] if rest else []
    return f"SM {sm}, memory {memory}, {power}, {heat} degrees C, clocks held down by {', '.join(named) or 'nothing'}"
