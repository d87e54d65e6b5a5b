"""Device times of work that is queued again and again: without pauses, or in bursts with the card at rest before each.

Work that is launched without pauses runs at the clock that the card keeps up under its power limit, a burst at the one
it starts with. What is compared has to be sampled in the same way, ceilings included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from g4kv_cli.records.bench import Timing, timing_of

if TYPE_CHECKING:
    from g4kv_cli.bench.clock import ClockProbe
    from g4kv_cli.device.cuda import CudaDevice

SAMPLES_TO_ESTIMATE = 2
MIN_SAMPLES = 4
MAX_SAMPLES = 40

LONG_REPLAY_SECONDS = 0.1
"""A replay that takes longer is long: of another library's kernel, say, that is a tenth as fast as ours. The samples of
the estimate are then the round's, and rounds and bursts are LONG_ROUNDS at most: all of them take a minute a cell."""
LONG_ROUNDS = 2

BURST_CALLS = 10
"""Of a burst, where they take no longer than BURST_SECONDS; always one replay, which has a call for every pool."""
BURST_SECONDS = 2e-3
"""A card takes its clock back within some tens of milliseconds."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds of each of some replays, or of a call of them; and the SMs' mean clock while they ran."""

    seconds: tuple[float, ...]
    clocks_hz: tuple[float, ...] = ()

    def over(self, calls: int) -> Samples:
        """Of one call, where a replay has ``calls``."""
        return Samples(tuple(seconds / calls for seconds in self.seconds), self.clocks_hz)


Sampler = Callable[[int], Samples]
"""So many replays back to back, behind one that is not counted; seconds a call."""


def sample_replays(
    device: CudaDevice, replay: Callable[[], object], count: int, probe: ClockProbe | None = None
) -> Samples:
    """Each of ``count`` replays back to back, behind one that is not counted; their clock by ``probe``.

    The stream never runs dry between two events, so no time of the host's is in any sample.
    """
    driver = device._driver
    events = [device.call("make an event", driver.cuEventCreate(0)) for _ in range(count + 1)]
    try:
        replay()
        if probe is not None:
            probe.begin()
        device.call("record an event", driver.cuEventRecord(events[0], device.stream.handle))
        for event in events[1:]:
            replay()
            device.call("record an event", driver.cuEventRecord(event, device.stream.handle))
        if probe is not None:
            probe.end()
        device.synchronize()
        pairs = itertools.pairwise(events)
        seconds = [float(device.call("read an event", driver.cuEventElapsedTime(*pair))) * 1e-3 for pair in pairs]
        return Samples(tuple(seconds), () if probe is None else probe.hertz())
    finally:
        for event in events:
            driver.cuEventDestroy(event)


def sample_round(sample: Sampler, calls: int, seconds: float) -> Samples:
    """Samples for about ``seconds``. ``calls``: of a replay."""
    first = sample(SAMPLES_TO_ESTIMATE)
    estimate = min(first.seconds)
    if is_long(estimate, calls):
        return first
    wanted = int(seconds / max(estimate * calls, 1e-9))
    return sample(max(MIN_SAMPLES, min(MAX_SAMPLES, wanted)))


def is_long(seconds_a_call: float, calls: int) -> bool:
    """Whether a replay of so many calls is long."""
    return seconds_a_call * calls > LONG_REPLAY_SECONDS


def burst_replays(seconds_a_call: float, calls: int) -> int:
    """Replays of a burst: of BURST_CALLS calls, of fewer where they are long, of one replay at least."""
    in_time = int(BURST_SECONDS / max(seconds_a_call * calls, 1e-9))
    return max(1, min(-(-BURST_CALLS // calls), in_time))


def sample_burst(sample: Sampler, replays: int, rest_seconds: float, sleep: Callable[[float], None]) -> Samples:
    """One sample, the mean of ``replays``, after a rest."""
    sleep(rest_seconds)
    found = sample(replays)
    return Samples((sum(found.seconds) / len(found.seconds),), found.clocks_hz)


def timing_of_samples(rounds: Sequence[Samples]) -> Timing:
    """The timing of a configuration by its rounds, or its bursts."""
    return timing_of([one.seconds for one in rounds], [one.clocks_hz for one in rounds])
