"""Times, rates and shares of a bench as people read them."""

from __future__ import annotations

from g4kv_cli.records.bench import Ceilings
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


def rate_text(row: Row) -> str:
    """``4250 GB/s`` or ``521 TFLOP/s``; empty without a time."""
    if not row.rate:
        return ""
    return f"{row.rate / 1e9:.0f} GB/s" if row.rate_kind == "bytes" else f"{row.rate / 1e12:.0f} TFLOP/s"


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
        parts.append(f"bf16 GEMM {ceilings.gemm_flops_per_second / 1e12:.0f} TFLOP/s")
    if ceilings.launch_seconds:
        parts.append(f"empty launch {time_text(ceilings.launch_seconds)}")
    return ", ".join(parts)


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
