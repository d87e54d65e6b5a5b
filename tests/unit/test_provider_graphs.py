"""The stand-in for libcudart captures streams into graphs and launches those, as CUDA's runtime is documented to."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cudart_caller import Caller, fixtures_of

STEP = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry ranks(.param .u64 out) {
  .reg .b32 %r<3>;
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [out];
  ld.global.u32 %r1, [%rd1];
  mad.lo.u32 %r2, %r1, 3, 1;
  st.global.u32 [%rd1], %r2;
  ret;
}
"""
"""x = 3 x + 1: how often, and before or behind what else, shows."""
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
BLOCKING, NON_BLOCKING = range(2)
LEGACY = None
H2D, D2H, D2D = 1, 2, 3


class _Extent(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32))


class Streams(Caller):
    """Streams, events and graphs of a launcher that has one kernel, ``STEP``."""

    def __init__(self, folder: Path, major: int) -> None:
        super().__init__(folder, major)
        self.step = self.registered(STEP)
        self.out = self.allocate(16)
        self.set(1)

    def of(self, name: str, *arguments: Any) -> int:
        """Call it; a result of 0 is wanted."""
        error = int(self[name](*arguments))
        assert error == 0, f"{name}: {error} {self.state.error}"
        return error

    def made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """What a function gives over its first argument."""
        found = ctypes.c_void_p()
        self.of(name, ctypes.byref(found), *arguments)
        return found

    def stream(self, flags: int = NON_BLOCKING) -> ctypes.c_void_p:
        return self.made("cudaStreamCreateWithFlags", flags)

    def event(self) -> ctypes.c_void_p:
        return self.made("cudaEventCreateWithFlags", 2)

    def set(self, value: int) -> None:
        self.of("cudaMemcpy", self.out, ctypes.byref(ctypes.c_uint32(value)), ctypes.c_size_t(4), H2D)

    @property
    def value(self) -> int:
        return self.read(self.out, 1)[0]

    def launch(self, stream: Any, out: Any = None) -> int:
        """Queue the step."""
        function = self["cudaLaunchKernel"]
        function.argtypes = [ctypes.c_void_p, _Extent, _Extent, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        at = out or self.out
        return int(function(self.step, _Extent(1, 1, 1), _Extent(1, 1, 1), (ctypes.c_void_p * 1)(ctypes.addressof(at)),
                            0, stream))  # fmt: skip

    def begin(self, stream: Any, mode: int = GLOBAL) -> int:
        return int(self.cudaStreamBeginCapture(stream, mode))

    def end(self, stream: Any) -> tuple[int, ctypes.c_void_p]:
        graph = ctypes.c_void_p(1)
        return int(self.cudaStreamEndCapture(stream, ctypes.byref(graph))), graph

    def captured(self, stream: Any, steps: int = 1) -> ctypes.c_void_p:
        """A graph of so many steps."""
        assert self.begin(stream) == 0
        for _ in range(steps):
            assert self.launch(stream) == 0, self.state.error
        error, graph = self.end(stream)
        assert error == 0
        return graph

    def ready(self, graph: ctypes.c_void_p) -> ctypes.c_void_p:
        return self.made("cudaGraphInstantiate", graph, ctypes.c_uint64(0))


streams, streams_13 = fixtures_of(Streams)


def test_a_captured_stream_does_nothing_until_its_graph_is_launched(streams: Streams) -> None:
    """Arguments are those of the capture, what they point to is as it is when the graph runs."""
    stream, source, seen = streams.stream(), ctypes.c_uint32(5), []
    note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: seen.append((data, source.value)))
    argument = ctypes.c_void_p(streams.out.value)
    assert streams.begin(stream) == 0
    streams.of("cudaMemcpyAsync", streams.out, ctypes.byref(source), ctypes.c_size_t(4), H2D, stream)
    assert streams.launch(stream, argument) == 0
    argument.value = 0
    streams.of("cudaLaunchHostFunc", stream, note, ctypes.c_void_p(42))
    assert streams.launch(stream) == 0
    error, graph = streams.end(stream)
    assert (error, seen) == (0, [])
    assert not streams.launches
    ready = streams.ready(graph)
    streams.of("cudaGraphDestroy", graph)
    assert streams.value == 1
    source.value = 7
    streams.of("cudaGraphUpload", ready, stream)
    streams.of("cudaGraphLaunch", ready, stream)
    assert (streams.value, seen) == (3 * (3 * 7 + 1) + 1, [(42, 7)])
    source.value = 2
    streams.of("cudaGraphLaunch", ready, LEGACY)
    assert (streams.value, len(seen)) == (3 * (3 * 2 + 1) + 1, 2)
    streams.of("cudaGraphExecDestroy", ready)
    assert streams.cudaGraphLaunch(ready, stream) == 1, "it was destroyed"
    assert streams.launch(stream) == 0
    assert streams.value == 3 * 22 + 1, "the stream captures no more"


def test_the_stream_that_a_launcher_is_given_can_be_captured(streams_13: Streams) -> None:
    graph = streams_13.captured(ctypes.c_void_p(streams_13.device.stream_handle))
    streams_13.of("cudaGraphLaunch", streams_13.ready(graph), LEGACY)
    assert streams_13.value == 4


def test_other_streams_go_on_while_one_captures(streams_13: Streams) -> None:
    stream, other = streams_13.stream(), streams_13.stream()
    assert streams_13.begin(stream) == 0
    status = ctypes.c_int(7)
    for each, want in ((stream, 1), (other, 0)):
        streams_13.of("cudaStreamIsCapturing", each, ctypes.byref(status))
        assert status.value == want
    assert streams_13.launch(other) == 0
    assert streams_13.value == 4, "a copy that waits: the stream that captures is none of the legacy stream's"
    streams_13.of("cudaStreamSynchronize", other)
    error, graph = streams_13.end(stream)
    assert (error, bool(graph.value)) == (0, True)
    streams_13.of("cudaGraphLaunch", streams_13.ready(graph), stream)
    assert streams_13.value == 4, "nothing was captured"


def test_what_is_told_of_a_capture(streams: Streams) -> None:
    stream, status, number = streams.stream(), ctypes.c_int(9), ctypes.c_uint64(9)
    nothing = [None] * (4 if streams.major >= 13 else 0)
    asked = (stream, ctypes.byref(status), ctypes.byref(number), *nothing)
    streams.of("cudaStreamGetCaptureInfo", *asked)
    assert (status.value, number.value) == (0, 0)
    found = []
    for _ in range(2):
        assert streams.begin(stream) == 0
        streams.of("cudaStreamGetCaptureInfo", *asked)
        assert streams.cudaStreamAddCallback(stream, None, None, 0) == 900
        found.append((status.value, number.value))
        assert streams.end(stream)[0] == 901
    assert [one for one, _ in found] == [1, 1]
    assert len({0, *(number for _, number in found)}) == 3
    at = ctypes.byref(ctypes.c_void_p())
    assert streams.cudaStreamGetCaptureInfo_v2(*asked[:3], at, None, None) != 0
    assert "calls cudaStreamGetCaptureInfo for a graph or its nodes, which" in str(streams.state.error)


@pytest.mark.parametrize("is_joined", [True, False])
def test_streams_join_a_capture_by_events(streams_13: Streams, is_joined: bool) -> None:
    one, two, fork, join = streams_13.stream(), streams_13.stream(), streams_13.event(), streams_13.event()
    assert streams_13.begin(one) == 0
    streams_13.of("cudaEventRecord", fork, one)
    streams_13.of("cudaStreamWaitEvent", two, fork, 0)
    assert streams_13.launch(two) == 0
    streams_13.of("cudaEventRecord", join, two)
    if not is_joined:
        assert streams_13.launch(two) == 0, "behind what the first stream waits for"
    streams_13.of("cudaStreamWaitEvent", one, join, 0)
    assert streams_13.launch(one) == 0
    assert streams_13.cudaEventQuery(join) == 907
    error, graph = streams_13.end(one)
    assert (error, bool(graph.value)) == ((0, True) if is_joined else (904, False))
    streams_13.of("cudaEventSynchronize", join)
    if is_joined:
        streams_13.of("cudaGraphLaunch", streams_13.ready(graph), two)
        assert streams_13.value == 13


def _copy_at_once(streams: Streams) -> int:
    return int(streams.cudaMemcpy(streams.out, ctypes.byref(ctypes.c_uint32(9)), ctypes.c_size_t(4), H2D))


@pytest.mark.parametrize(
    ("flags", "mode", "do", "error"),
    [
        (BLOCKING, RELAXED, _copy_at_once, 906),
        (NON_BLOCKING, GLOBAL, _copy_at_once, 0),
        (BLOCKING, RELAXED, lambda streams: streams.launch(LEGACY), 906),
        (NON_BLOCKING, RELAXED, lambda streams: streams.launch(LEGACY), 0),
        (NON_BLOCKING, GLOBAL, lambda streams: streams.cudaMalloc(ctypes.byref(ctypes.c_void_p()), 4), 900),
        (NON_BLOCKING, THREAD_LOCAL, lambda streams: streams.cudaHostAlloc(ctypes.byref(ctypes.c_void_p()), 4, 0), 900),
        (NON_BLOCKING, RELAXED, lambda streams: streams.cudaMalloc(ctypes.byref(ctypes.c_void_p()), 4), 0),
        (NON_BLOCKING, GLOBAL, lambda streams: streams.cudaDeviceSynchronize(), 900),
    ],
)  # fmt: skip
def test_what_may_not_be_done_during_a_capture_ends_it(
    streams_13: Streams, flags: int, mode: int, do: Callable[[Streams], int], error: int
) -> None:
    stream = streams_13.stream(flags)
    assert streams_13.begin(stream, mode) == 0
    assert streams_13.launch(stream) == 0
    assert do(streams_13) == error
    assert streams_13.cudaGetLastError() == error
    status = ctypes.c_int()
    assert streams_13.cudaStreamIsCapturing(stream, ctypes.byref(status)) == 0
    assert status.value == (2 if error else 1)
    assert streams_13.launch(stream) == (901 if error else 0)
    ended, graph = streams_13.end(stream)
    assert (ended, bool(graph.value)) == ((901, False) if error else (0, True))
    assert streams_13.launch(stream) == 0, "it captures no more"


def test_a_thread_may_be_relaxed_for_a_while(streams_13: Streams) -> None:
    mode, stream = ctypes.c_int(RELAXED), streams_13.stream()
    assert streams_13.begin(stream) == 0
    streams_13.of("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert mode.value == GLOBAL
    streams_13.allocate(4)
    streams_13.of("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert mode.value == RELAXED
    assert streams_13.cudaFree(streams_13.out) == 900
    assert streams_13.end(stream)[0] == 901


def test_captures_that_cannot_be(streams_13: Streams) -> None:
    one, two, three = (streams_13.stream() for _ in range(3))
    old, new = streams_13.event(), streams_13.event()
    streams_13.of("cudaEventRecord", old, two)
    assert streams_13.begin(LEGACY) == 900
    assert streams_13.end(one)[0] == 401, "it did not begin"
    assert streams_13.begin(one) == 0
    assert streams_13.begin(one) == 401
    streams_13.of("cudaEventRecord", new, one)
    streams_13.of("cudaStreamWaitEvent", two, new, 0)
    assert streams_13.end(two)[0] == 903
    assert streams_13.end(one)[0] == 901
    assert streams_13.begin(one) == 0
    assert streams_13.cudaStreamWaitEvent(one, old, 0) == 905, "what it waits for is in no graph"
    assert streams_13.end(one)[0] == 901
    assert streams_13.begin(one) == streams_13.begin(three) == 0
    streams_13.of("cudaEventRecord", new, one)
    assert streams_13.cudaStreamWaitEvent(three, new, 0) == 902
    assert streams_13.cudaStreamQuery(one) == 900
    assert [streams_13.end(each)[0] for each in (one, three)] == [901, 901]
    assert streams_13.cudaStreamBeginCapture_ptsz(None, GLOBAL) != 0
    assert "cudaStreamBeginCapture of the per-thread default stream, which the" in str(streams_13.state.error)


def test_a_ready_graph_takes_the_arguments_of_another(streams: Streams) -> None:
    stream, other = streams.stream(), streams.allocate(16)
    ready = streams.ready(streams.captured(stream, 2))
    told = (ctypes.c_uint64 * 3)(*[2**64 - 1] * 3)
    assert streams.begin(stream) == 0
    assert streams.launch(stream, other) == streams.launch(stream) == 0
    streams.of("cudaGraphExecUpdate", ready, streams.end(stream)[1], told)
    assert (told[0] & 0xFFFFFFFF, told[1], told[2]) == (0, 0, 0)
    streams.of("cudaMemset", other, 0, ctypes.c_size_t(4))
    streams.of("cudaGraphLaunch", ready, stream)
    assert (streams.read(other, 1), streams.value) == ([1], 4)
    assert streams.cudaGraphExecUpdate(ready, streams.captured(stream, 3), told) == 910
    assert told[0] & 0xFFFFFFFF == 2, "cudaGraphExecUpdateErrorTopologyChanged"
    assert streams.begin(stream) == 0
    assert streams.launch(stream) == 0
    streams.of("cudaMemsetAsync", other, 0, ctypes.c_size_t(4), stream)
    assert streams.cudaGraphExecUpdate(ready, streams.end(stream)[1], told) == 910
    assert told[0] & 0xFFFFFFFF == 3, "cudaGraphExecUpdateErrorNodeTypeChanged"
    streams.of("cudaGraphLaunch", ready, stream)
    assert streams.value == 13, "what it was before"


def test_the_nodes_of_a_graph_and_graphs_in_graphs(streams_13: Streams) -> None:
    stream, count = streams_13.stream(), ctypes.c_size_t(99)
    inner = streams_13.ready(streams_13.captured(stream, 2))
    assert streams_13.begin(stream) == 0
    memory = streams_13.made("cudaMallocAsync", ctypes.c_size_t(4), stream)
    streams_13.of("cudaMemcpyAsync", memory, streams_13.out, ctypes.c_size_t(4), D2D, stream)
    streams_13.of("cudaGraphLaunch", inner, stream)
    streams_13.of("cudaMemsetAsync", memory, 0, ctypes.c_size_t(4), stream)
    streams_13.of("cudaFreeAsync", memory, stream)
    graph = streams_13.end(stream)[1]
    streams_13.of("cudaGraphExecDestroy", inner)
    copy = streams_13.made("cudaGraphClone", graph)
    streams_13.of("cudaGraphGetNodes", copy, None, ctypes.byref(count))
    assert count.value == 5
    nodes, kinds = (ctypes.c_void_p * 5)(), []
    streams_13.of("cudaGraphGetNodes", graph, nodes, ctypes.byref(count))
    for node in nodes:
        kind = ctypes.c_int()
        streams_13.of("cudaGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        kinds.append(kind.value)
    assert kinds == [10, 1, 4, 2, 11]
    streams_13.of("cudaGraphLaunch", streams_13.ready(copy), stream)
    assert streams_13.value == 13


def test_memory_of_a_graph_goes_with_the_last_that_uses_it(streams_13: Streams) -> None:
    stream, free = streams_13.stream(), streams_13.device.free_bytes
    assert streams_13.begin(stream) == 0
    memory = streams_13.made("cudaMallocAsync", ctypes.c_size_t(256), stream)
    assert streams_13.cudaFreeAsync(streams_13.out, stream) == 1, "it is not the graph's"
    streams_13.of("cudaMemsetAsync", memory, 1, ctypes.c_size_t(256), stream)
    streams_13.of("cudaFreeAsync", memory, stream)
    graph = streams_13.end(stream)[1]
    ready = streams_13.ready(graph)
    streams_13.of("cudaGraphDestroy", graph)
    streams_13.of("cudaGraphLaunch", ready, stream)
    assert streams_13.device.free_bytes == free - 256
    streams_13.of("cudaGraphExecDestroy", ready)
    gc.collect()
    assert streams_13.device.free_bytes == free


def test_a_graph_that_is_replayed_behind_its_memory_faults(streams_13: Streams) -> None:
    """A stale graph stores where the arrays of an earlier call were."""
    stream, array = streams_13.stream(), streams_13.allocate(16)
    streams_13.of("cudaMemset", array, 0, ctypes.c_size_t(16))
    assert streams_13.begin(stream) == 0
    assert streams_13.launch(stream, array) == 0
    ready = streams_13.ready(streams_13.end(stream)[1])
    streams_13.of("cudaGraphLaunch", ready, stream)
    streams_13.of("cudaFree", array)
    assert streams_13.cudaGraphLaunch(ready, stream) != 0
    assert "use_after_free" in str(streams_13.state.error)


@pytest.mark.parametrize(("is_freed", "kind"), [(True, "use_after_free"), (False, "global_out_of_bounds")])
def test_a_copy_to_where_nothing_is_any_more_says_so(streams_13: Streams, is_freed: bool, kind: str) -> None:
    array = streams_13.allocate(16)
    if is_freed:
        streams_13.of("cudaFree", array)
    assert streams_13.cudaMemset(array, 0, ctypes.c_size_t(16 if is_freed else 17)) != 0
    assert str(streams_13.state.error).startswith(f"{kind}: a copy to the device: host access ")


def test_there_is_one_memory_pool(streams: Streams) -> None:
    pool, threshold, reuse = streams.made("cudaDeviceGetDefaultMemPool", 0), ctypes.c_uint64(1 << 40), ctypes.c_int()
    streams.of("cudaMemPoolSetAttribute", pool, 4, ctypes.byref(threshold))
    threshold.value = 0
    streams.of("cudaMemPoolGetAttribute", pool, 4, ctypes.byref(threshold))
    streams.of("cudaMemPoolGetAttribute", pool, 1, ctypes.byref(reuse))
    assert (threshold.value, reuse.value) == (1 << 40, 1)
    supported = ctypes.c_int()
    streams.of("cudaDeviceGetAttribute", ctypes.byref(supported), 115, 0)
    assert supported.value == 1
    free = streams.device.free_bytes
    memory = streams.made("cudaMallocFromPoolAsync", ctypes.c_size_t(64), pool, None)
    assert streams.device.free_bytes == free - 64
    streams.of("cudaFreeAsync", memory, None)
    streams.of("cudaMemPoolTrimTo", pool, ctypes.c_size_t(0))
    assert streams.cudaMemPoolSetAttribute(pool, 9, ctypes.byref(threshold)) == 1
    assert streams.cudaMemPoolGetAttribute(pool, 7, ctypes.byref(threshold)) != 0
    assert "cudaMemPoolGetAttribute with a statistic, which the stand-in" in str(streams.state.error)


def test_a_result_of_graphs_without_a_place_is_an_invalid_value(streams_13: Streams) -> None:
    stream = streams_13.stream()
    graph = streams_13.captured(stream)
    assert streams_13.cudaGraphInstantiate(None, graph, ctypes.c_uint64(0)) == 1
    assert streams_13.cudaStreamEndCapture(stream, None) == 1
    assert streams_13.cudaGraphGetNodes(graph, None, None) == 1
    assert streams_13.cudaGraphLaunch(None, stream) == 1
    assert streams_13.cudaStreamDestroy(None) == 400
    how = (ctypes.c_uint64 * 4)(0, 0, 7, 7)
    assert streams_13.cudaGraphInstantiateWithParams(ctypes.byref(ctypes.c_void_p()), ctypes.c_void_p(9), how) == 1
    assert (how[2], how[3] & 0xFFFFFFFF) == (0, 1)
