"""The sweep with a scripted backend: order, checks before and after timing, and what one bad cell does to the rest."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from g4kv_cli.bench.run import Request, _interrupts, make_plan
from g4kv_cli.bench.samples import Samples, burst_replays
from g4kv_cli.bench.sweep import RunEnded, Runnable, Sweep, SweepSettings
from g4kv_cli.entries.provider import NotCovered
from g4kv_cli.errors import DeviceFault, DeviceUnavailable
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.records.bench import Ceilings, Measurement, Shape

pytestmark = pytest.mark.usefixtures("forms_a_b_c")

CEILINGS = Ceilings(read_bytes_per_second=4.7e12, copy_bytes_per_second=4.28e12)
GEOMETRY = GEOMETRIES["12b-local"]


@dataclass
class Script:
    """What goes wrong, by (batch, configuration); and everything that happened, in order."""

    errors: dict[tuple[int, str, str], Exception] = field(default_factory=dict)
    wrong: dict[tuple[int, str, bool], str] = field(default_factory=dict)
    seconds: float = 100e-6
    slow_rounds: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    long: tuple[str, ...] = ()
    events: list[str] = field(default_factory=list)
    interrupt_after: str = ""

    def step(self, batch: int, configuration: str, what: str) -> None:
        self.events.append(f"{batch} {configuration} {what}")
        if (batch, configuration, what) in self.errors:
            raise self.errors[batch, configuration, what]

    def interrupted(self) -> bool:
        return self.interrupt_after != "" and self.interrupt_after in self.events


class FakeRunnable:
    def __init__(self, script: Script, batch: int, configuration: str) -> None:
        self.configuration = configuration
        self._script, self._batch = script, batch

    def check(self, *, fresh: bool) -> str:
        self._script.step(self._batch, self.configuration, "check fresh" if fresh else "check")
        return self._script.wrong.get((self._batch, self.configuration, fresh), "")

    def capture(self) -> None:
        self._script.step(self._batch, self.configuration, "capture")

    def sample(self, count: int) -> Samples:
        self._script.step(self._batch, self.configuration, "sample")
        # Two samplings a round, one to estimate and one for the record; of long replays the former alone.
        sampled = self._script.events.count(f"{self._batch} {self.configuration} sample")
        round_number = (sampled - 1) // (1 if self.configuration in self._script.long else 2)
        is_slow = round_number in self._script.slow_rounds.get((self._batch, self.configuration), ())
        rested = len(self._script.events) > 1 and self._script.events[-2].startswith("rest")
        if rested and (self._batch, self.configuration, "burst") in self._script.errors:
            raise self._script.errors[self._batch, self.configuration, "burst"]
        seconds = self._script.seconds * (1.3 if is_slow else 0.9 if rested else 1)
        seconds *= 1000 if self.configuration in self._script.long else 1
        return Samples(tuple(seconds * (1 + index / 1000) for index in range(count)), (1.9e9 if rested else 1.5e9,))

    def queue_single(self) -> None:
        self._script.step(self._batch, self.configuration, "single")


class FakeShape:
    pools = 4
    rotating_bytes = 400_000_000
    checked_rows = 6

    def __init__(self, script: Script, batch: int) -> None:
        self._script, self._batch = script, batch

    def make(self, configuration: str) -> Runnable:
        self._script.step(self._batch, configuration, "make")
        return FakeRunnable(self._script, self._batch, configuration)

    def renew_inputs(self) -> None:
        self._script.step(self._batch, "*", "renew")

    def close(self) -> None:
        self._script.step(self._batch, "*", "close")


class FakeBackend:
    cache_bytes = 62_900_000

    def __init__(self, script: Script) -> None:
        self._script = script

    def open(self, shape: Shape) -> FakeShape:
        self._script.step(shape.batch, "*", "open")
        return FakeShape(self._script, shape.batch)


@dataclass
class Run:
    """A sweep over two shapes of three configurations: batch 16 and 64, a, b, c2."""

    script: Script
    rounds: int = 2
    rest_seconds: float | None = None
    burst_ceilings: Ceilings | None = None
    done: dict[str, Measurement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        request = Request("decode", (GEOMETRY,), "quick", batches=(16, 64), kv_lens=(128,), splits=(2,))
        plan = make_plan(request)
        settings = SweepSettings(self.rounds, seconds_per_round=0.002, bursts=3, rest_seconds=self.rest_seconds)
        self.sweep = Sweep(
            FakeBackend(self.script), plan.shapes, plan.cells, CEILINGS, settings, self.put, self.script.interrupted,
            burst_ceilings=self.burst_ceilings, sleep=lambda seconds: self.script.events.append(f"rest {seconds}"),
        )  # fmt: skip

    def put(self, measurements: Sequence[Measurement]) -> None:
        self.script.events.append("put")
        self.done.update({item.id: item for item in measurements})

    def status(self) -> list[str]:
        cells = [self.done.get(cell.id, cell) for cell in self.sweep.cells]
        return [f"{cell.shape.split('/')[2][5:]} {cell.configuration} {cell.status}" for cell in cells]

    def reason(self, batch: int, configuration: str) -> str:
        cell = next(item for item in self.sweep.cells if item.id.endswith(f"batch{batch}/kv128/{configuration}"))
        return self.done.get(cell.id, cell).reason


ALL_MEASURED = ["16 a measured", "16 b measured", "16 c2 measured", "64 a measured", "64 b measured", "64 c2 measured"]


def test_the_order_of_a_shape() -> None:
    run = Run(Script())
    run.sweep.run_all()
    first = run.script.events[: run.script.events.index("put")]
    # Each round samples twice a configuration: once to estimate, once for the record. The second round turns round.
    assert first == [
        "16 * open",
        "16 a make", "16 a check", "16 a capture",
        "16 b make", "16 b check", "16 b capture",
        "16 c2 make", "16 c2 check", "16 c2 capture",
        "16 a sample", "16 a sample", "16 b sample", "16 b sample", "16 c2 sample", "16 c2 sample",
        "16 c2 sample", "16 c2 sample", "16 b sample", "16 b sample", "16 a sample", "16 a sample",
        "16 * renew", "16 a check fresh", "16 b check fresh", "16 c2 check fresh",
    ]  # fmt: skip
    assert run.script.events[-1] == "64 * close"
    assert run.status() == ALL_MEASURED
    assert run.sweep.ended == ""


def test_what_a_measurement_holds() -> None:
    run = Run(Script())
    run.sweep.run_all()
    found = run.done["decode/12b-local/batch16/kv128/c2"]
    # 2 ms a round over 4 calls of 100 us: 5 replays, in each of 2 rounds; 100.0 to 100.4 us.
    assert found.graph is not None
    assert found.graph.count == 10
    assert found.graph.low == pytest.approx(100e-6)
    assert found.graph.high == pytest.approx(100.4e-6)
    assert found.graph.median == pytest.approx(100.2e-6)
    assert found.graph.round_medians == pytest.approx((100.2e-6, 100.2e-6))
    assert (found.pools, found.rotating_bytes, found.checked_rows, found.num_splits) == (4, 400_000_000, 6, 2)


def test_bursts_follow_the_rounds_with_a_rest_before_each() -> None:
    run = Run(Script(), rest_seconds=0.3)
    run.sweep.run_all()
    first = run.script.events[: run.script.events.index("put")]
    begin = first.index("rest 0.3")
    assert "rest 0.3" not in first[:begin]
    assert first[begin:-4] == [
        step for name in ("a", "b", "c2", "c2", "b", "a", "a", "b", "c2") for step in ("rest 0.3", f"16 {name} sample")
    ]
    found = run.done["decode/12b-local/batch16/kv128/c2"]
    # A burst is one sample: the mean of 3 replays of 4 calls, 90 us and a thousandth more each.
    assert found.burst is not None
    assert (found.burst.count, found.burst_calls) == (3, 12)
    assert found.burst.round_medians == pytest.approx([90e-6 * 1.001] * 3)
    assert (found.burst.clock_hz, found.graph and found.graph.clock_hz) == (1.9e9, 1.5e9)
    assert found.seconds == found.graph.median == pytest.approx(100.2e-6)  # type: ignore[union-attr]


def test_prefill_has_bursts_unless_told_otherwise() -> None:
    usual = SweepSettings()
    assert [usual.rest_of(kind) for kind in ("decode", "prefill", "prep")] == [0.0, 0.2, 0.0]
    assert [SweepSettings(rest_seconds=0.0).rest_of(kind) for kind in ("decode", "prefill")] == [0.0, 0.0]
    assert [SweepSettings(rest_seconds=1.0).rest_of(kind) for kind in ("decode", "prefill")] == [1.0, 1.0]
    run = Run(Script())  # decode
    run.sweep.run_all()
    assert {(item.burst, item.burst_calls) for item in run.done.values()} == {(None, 0)}


@pytest.mark.parametrize(
    ("seconds", "calls", "replays"),
    [
        (30e-6, 1, 10),  # ten calls
        (30e-6, 4, 3),  # the fewest replays that hold ten
        (400e-6, 1, 5),  # as many as end within 2 ms
        (400e-6, 2, 2),
        (24e-3, 2, 1),  # one replay whatever it takes
    ],
)
def test_how_long_a_burst_is(seconds: float, calls: int, replays: int) -> None:
    assert burst_replays(seconds, calls) == replays


def test_a_burst_under_the_floor_of_bursts_is_no_time() -> None:
    # 90 us are allowed by what the card reached without pauses, not by a card that reads a tenth as fast in bursts.
    slow = Ceilings(read_bytes_per_second=0.4e12, copy_bytes_per_second=0.4e12)
    run = Run(Script(), rest_seconds=0.3, burst_ceilings=slow)
    run.sweep.run_all()
    assert run.status()[3:] == ["64 a impossible", "64 b impossible", "64 c2 impossible"]
    assert run.reason(64, "b").startswith("90.09 us is under the floor")


def test_a_burst_that_fails_costs_its_cell() -> None:
    script = Script(errors={(16, "b", "burst"): RuntimeError("no")})
    run = Run(script, rest_seconds=0.3)
    run.sweep.run_all()
    assert run.status() == ["16 a measured", "16 b failed", *ALL_MEASURED[2:]]


def test_rounds_that_disagree_are_followed_by_others() -> None:
    # Four rounds, the last 30 % slower: 15 % of doubt. From seven on one outlier says nothing about the median:
    # 2 * (1 + 7) / 2^7 = 0.125.
    script = Script(slow_rounds={(16, "b"): (3,)})
    run = Run(script, rounds=4)
    run.sweep.run_all()
    unsteady = run.done["decode/12b-local/batch16/kv128/b"].graph
    assert unsteady is not None
    assert len(unsteady.round_medians) == 7
    assert unsteady.noise < 0.001
    assert unsteady.high == pytest.approx(130.39e-6)  # the slow samples stay
    # All configurations of the shape went along; the steady shape after it kept to its four.
    rounds = {name: len(item.graph.round_medians) for name, item in run.done.items() if item.graph is not None}
    assert [rounds[cell.id] for cell in run.sweep.cells] == [7, 7, 7, 4, 4, 4]


def test_a_configuration_with_long_replays_is_sampled_less() -> None:
    # 4 calls of 100 ms. The others go on, also with the rounds that their own doubt asks for.
    run = Run(Script(long=("b",), slow_rounds={(16, "a"): (3,)}), rounds=4, rest_seconds=0.3)
    run.sweep.run_all()
    assert run.status() == ALL_MEASURED
    found = {name: item for name, item in run.done.items() if item.graph is not None and item.burst is not None}
    rounds = {name: (len(item.graph.round_medians), item.graph.count, item.burst.count) for name, item in found.items()}
    # Two rounds of the two samples that an estimate takes; two bursts of one replay.
    assert [rounds[cell.id] for cell in run.sweep.cells] == [
        (7, 34, 3), (2, 4, 2), (7, 35, 3), (4, 20, 3), (2, 4, 2), (4, 20, 3),
    ]  # fmt: skip
    assert run.done["decode/12b-local/batch16/kv128/b"].burst_calls == 4
    assert run.script.events.count("16 b sample") == 4


def test_a_long_configuration_that_is_unsteady_asks_for_no_other_rounds() -> None:
    run = Run(Script(long=("b",), slow_rounds={(16, "b"): (0,)}), rounds=2)
    run.sweep.run_all()
    unsteady = run.done["decode/12b-local/batch16/kv128/b"].graph
    assert unsteady is not None
    assert unsteady.noise > 0.1
    assert run.script.events.count("16 a sample") == run.script.events.count("64 a sample") == 4


def test_one_round_is_one_round_where_its_samples_agree() -> None:
    run = Run(Script(), rounds=1)
    run.sweep.run_all()
    assert run.status() == ALL_MEASURED
    assert {len(item.graph.round_medians) for item in run.done.values() if item.graph is not None} == {1}


def test_rounds_that_keep_disagreeing_end_at_twice_as_many() -> None:
    run = Run(Script(slow_rounds={(16, "b"): (0, 2, 4, 6, 8, 10)}))
    run.sweep.run_all()
    unsteady = run.done["decode/12b-local/batch16/kv128/b"].graph
    assert unsteady is not None
    assert len(unsteady.round_medians) == 4  # of two asked for
    assert unsteady.noise > 0.1


def test_the_harness_gets_every_configuration_that_is_right() -> None:
    script = Script(wrong={(16, "b", False): "2 rows are wrong"})
    run = Run(script)
    for index in range(len(run.sweep.cells)):
        run.sweep.run_cell(index, lambda runnable: runnable.queue_single())
    singles = [event for event in script.events if event.endswith("single")]
    assert singles == ["16 a single", "16 c2 single", "64 a single", "64 b single", "64 c2 single"]


def test_a_wrong_kernel_is_never_timed() -> None:
    run = Run(Script(wrong={(16, "b", False): "2 rows are wrong"}))
    run.sweep.run_all()
    assert run.status() == ["16 a measured", "16 b wrong", "16 c2 measured", *ALL_MEASURED[3:]]
    assert run.reason(16, "b") == "2 rows are wrong"
    assert not [event for event in run.script.events if event.startswith("16 b") and "sample" in event]


def test_a_kernel_that_is_wrong_with_fresh_inputs_loses_its_time() -> None:
    run = Run(Script(wrong={(64, "a", True): "1 row is wrong"}))
    run.sweep.run_all()
    assert run.status() == [*ALL_MEASURED[:3], "64 a wrong", "64 b measured", "64 c2 measured"]
    assert run.reason(64, "a") == "after timing, with fresh inputs: 1 row is wrong"
    assert run.done["decode/12b-local/batch64/kv128/a"].graph is None


def test_a_time_under_the_floor_is_no_time() -> None:
    # Batch 16 at 128 keys reads 16.8 MB, 3.6 us at 4.7 TB/s; a quarter of the L2 may help each of four pools.
    run = Run(Script(seconds=0.01e-6))
    run.sweep.run_all()
    assert run.status()[3:] == ["64 a impossible", "64 b impossible", "64 c2 impossible"]
    assert run.reason(64, "a") == "0.01 us is under the floor of this run: an error of the measurement"


def test_a_shape_without_memory_is_skipped_and_the_rest_goes_on() -> None:
    run = Run(Script(errors={(16, "*", "open"): DeviceUnavailable("one pool takes 90 GiB")}))
    run.sweep.run_all()
    assert run.status() == ["16 a skipped", "16 b skipped", "16 c2 skipped", *ALL_MEASURED[3:]]
    assert run.reason(16, "c2") == "one pool takes 90 GiB"


@pytest.mark.parametrize("what", ["make", "check", "capture", "sample", "check fresh"])
def test_one_failing_cell_costs_itself_only(what: str) -> None:
    run = Run(Script(errors={(16, "b", what): RuntimeError("it broke")}))
    run.sweep.run_all()
    assert run.status() == ["16 a measured", "16 b failed", "16 c2 measured", *ALL_MEASURED[3:]]
    assert run.reason(16, "b") == "RuntimeError: it broke"


def test_a_cell_that_fails_in_the_harness_fails() -> None:
    run = Run(Script(errors={(64, "a", "single"): RuntimeError("no")}))
    whys = [run.sweep.run_cell(index, lambda runnable: runnable.queue_single()) for index in range(6)]
    assert whys == ["", "", "", "failed: RuntimeError: no", "", ""]
    assert run.status()[3] == "64 a failed"


def test_a_configuration_that_is_not_here_is_not_covered() -> None:
    run = Run(Script(errors={(16, "b", "make"): NotCovered("flashinfer is not installed")}))
    run.sweep.run_all()
    assert run.status()[1] == "16 b not covered"


@pytest.mark.parametrize("what", ["check", "sample", "check fresh"])
def test_a_device_fault_ends_the_run_and_keeps_what_was_finished(what: str) -> None:
    run = Run(Script(errors={(64, "b", what): DeviceFault(["a trap in decode.cu:20"])}))
    run.sweep.run_all()
    assert run.sweep.ended == "the device faulted: a trap in decode.cu:20"
    status = run.status()
    assert status[:3] == ALL_MEASURED[:3]
    assert status[4] == "64 b failed"
    assert status[5] == "64 c2 missing"
    assert run.reason(64, "b") == "device fault: a trap in decode.cu:20"
    assert run.reason(64, "c2") == "the run ended before it"
    # The memory went with the context: closing the shape would fault again.
    assert "64 * close" not in run.script.events
    with pytest.raises(RunEnded):
        run.sweep.run_cell(5)


def test_an_interrupt_keeps_the_finished_shapes() -> None:
    run = Run(Script(interrupt_after="64 a capture"))
    run.sweep.run_all()
    assert run.sweep.ended == "interrupted"
    assert run.status() == [*ALL_MEASURED[:3], "64 a missing", "64 b missing", "64 c2 missing"]
    assert run.script.events[-1] == "64 * close"


def test_the_first_interrupt_is_a_flag_and_the_second_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with _interrupts() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
