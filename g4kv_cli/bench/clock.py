"""The clock that the multiprocessors run at while work is sampled, by their own counters.

NVML's figure is of no use for so short a time: of an H200 it said 1980 MHz in every burst and round.
"""

from __future__ import annotations

import ctypes

import numpy as np

from g4kv_cli.device.interface import Device
from g4kv_cli.entries.launch import launch
from g4kv_cli.entries.library import KernelLibrary

SOURCE = "ceilings.cu"
MIN_NANOSECONDS = 20_000
"""Shorter work is none to tell a clock by: the card's nanoseconds come in steps of up to a microsecond."""


class ClockParameters(ctypes.Structure):
    """Twin of ``struct ClockParams`` (kernels/ceilings.cu): a device address."""

    _fields_ = (("reading", ctypes.c_uint64),)


class ClockProbe:
    """A reading before the work and one after it, in the device's stream."""

    def __init__(self, library: KernelLibrary) -> None:
        self._library = library
        self._device: Device = library.device
        self._readings = self._device.upload(np.zeros((2, 3), np.uint64), "clock readings")

    def begin(self) -> None:
        """Queue the reading before."""
        self._queue(0)

    def end(self) -> None:
        """Queue the reading after."""
        self._queue(1)

    def hertz(self) -> tuple[float, ...]:
        """The mean clock between the two, once they are done; none where they are of two multiprocessors, or the work
        was too short."""
        (begin, begin_ns, begin_at), (end, end_ns, end_at) = self._device.read(self._readings).tolist()
        if begin_at != end_at or end_ns - begin_ns < MIN_NANOSECONDS:
            return ()
        return ((end - begin) / (end_ns - begin_ns) * 1e9,)

    def close(self) -> None:
        """Return the memory."""
        self._device.free(self._readings)

    def _queue(self, at: int) -> None:
        parameters = ClockParameters(self._readings.view((3,), offset_elems=3 * at).address)
        launch(self._library, SOURCE, "ceiling_clock", grid=(1, 1, 1), block=(1, 1, 1), arguments=(parameters,))
