"""Device times of work that is queued again and again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from g4kv_cli.device.cuda import CudaDevice


def sample_replays(device: CudaDevice, replay: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of ``count`` replays back to back, behind one that is not counted.

    The stream never runs dry between two events, so no time of the host's is in any sample.
    """
    driver = device._driver
    events = [device.call("make an event", driver.cuEventCreate(0)) for _ in range(count + 1)]
    try:
        replay()
        device.call("record an event", driver.cuEventRecord(events[0], device.stream.handle))
        for event in events[1:]:
            replay()
            device.call("record an event", driver.cuEventRecord(event, device.stream.handle))
        device.synchronize()
        pairs = itertools.pairwise(events)
        return [float(device.call("read an event", driver.cuEventElapsedTime(*pair))) * 1e-3 for pair in pairs]
    finally:
        for event in events:
            driver.cuEventDestroy(event)
