"""Streams that capture, and the graphs that come of it, behind the stand-in for libcudart.

Without a capture everything is done when the call returns, in the order of the calls. While a stream captures, what is
queued there is kept as the nodes of a graph, in the order of the calls too, and done when the graph is launched: with
the arguments that were given then, and what memory holds now.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

SUCCESS, INVALID_VALUE, ILLEGAL_STATE = 0, 1, 401
UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT = range(900, 908)
AT_ONCE = 2**64 - 1
"""In the place of a stream: the call is done when it returns, and cannot be part of a graph."""
_LEGACY, _PER_THREAD = (0, 1), 2
_GLOBAL, _RELAXED = 0, 2  # cudaStreamCaptureMode
_BEGIN, _END, _STATUS, _RECORD, _WAIT, _LOOK_AT_STREAM, _LOOK_AT_EVENT, _LOOK_AT_DEVICE, _EXCHANGE_MODE = range(9)
_INSTANTIATE, _LAUNCH, _UPDATE, _CLONE, _NODES, _NODE_TYPE, _DESTROY = range(7)
Values = Any
"""A pointer to 64-bit operands, which a result overwrites."""
NodeKind = Literal["kernel", "memcpy", "memset", "host", "graph", "memAlloc", "memFree"]
_NODE_TYPES: dict[NodeKind, int] = {
    "kernel": 0, "memcpy": 1, "memset": 2, "host": 3, "graph": 4, "memAlloc": 10, "memFree": 11,
}  # fmt: skip
_TOPOLOGY_CHANGED, _TYPE_CHANGED, _FUNCTION_CHANGED = 2, 3, 4  # cudaGraphExecUpdateResult


@dataclass(frozen=True, slots=True)
class Node:
    """One piece of work. ``name``: of a kernel."""

    kind: NodeKind
    do: Callable[[], int]
    name: str = ""


Clock = dict[int, int]
"""For each stream the number of its pieces of work that are done by then."""


@dataclass(slots=True)
class _Capture:
    number: int
    origin: int
    mode: int
    nodes: list[Node] = field(default_factory=list)
    clocks: dict[int, Clock] = field(default_factory=dict)
    """What each stream of the capture is behind."""
    is_invalid: bool = False

    def queue(self, stream: int, node: Node) -> None:
        self.nodes.append(node)
        self.clocks[stream][stream] = self.clocks[stream].get(stream, 0) + 1

    @property
    def is_joined(self) -> bool:
        """Whether the stream that began it is behind everything."""
        seen = self.clocks[self.origin]
        return all(seen.get(stream, 0) >= clock.get(stream, 0) for stream, clock in self.clocks.items())


class StreamCaptures:
    """The captures that are open and the graphs that there are. Results are numbers of cudaError_t.

    ``release`` frees device memory that a graph has made, by its address.
    """

    def __init__(self, release: Callable[[int], object]) -> None:
        self._release = release
        self._open: list[_Capture] = []
        self._events: dict[int, tuple[_Capture, Clock]] = {}
        self._thread_mode = _GLOBAL
        self._numbers = itertools.count(1)
        self._graphs: dict[int, list[Node]] = {}
        self._node_types: dict[int, int] = {}
        self._made: dict[int, list[Node]] = {}
        """Memory of allocation nodes, by address: the nodes of its capture."""

    # --- work in streams ---------------------------------------------------------------------------------------------

    def queue(self, stream: int, node: Node) -> int:
        """Do it, or keep it for the graph that the stream captures."""
        if not self._open:
            return node.do()
        capture = self._of(stream)
        if capture is None:
            error = self._implicit(stream)
            return error or node.do()
        if capture.is_invalid:
            return INVALIDATED
        capture.queue(stream, node)
        return SUCCESS

    def allocate(self, stream: int, make: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        """(error, address) of memory that ``make`` allocates: for a graph it is there from the capture on."""
        if stream == AT_ONCE or not self._open:
            error = self.unsafe() if stream == AT_ONCE else SUCCESS
            return (error, 0) if error else make()
        capture = self._of(stream)
        error = self._implicit(stream) if capture is None else INVALIDATED * capture.is_invalid
        if error:
            return error, 0
        error, address = make()
        if capture is not None and not error:
            capture.queue(stream, Node("memAlloc", lambda: SUCCESS))
            self._made[address] = capture.nodes
        return error, address

    def free(self, stream: int, address: int, give_back: Callable[[], int]) -> int:
        """Free memory; in a graph, memory that it made itself, which is kept for its next launch."""
        if stream == AT_ONCE or not self._open:
            return self.unsafe() or give_back()
        capture = self._of(stream)
        if capture is None:
            return self._implicit(stream) or give_back()
        if self._made.get(address) is not capture.nodes:
            return INVALID_VALUE
        capture.queue(stream, Node("memFree", lambda: SUCCESS))
        return SUCCESS

    def unsafe(self) -> int:
        """The error of a call that may wait for the device, such as cudaMalloc: forbidden during a capture unless its
        mode, or the thread's, allows it."""
        if self._thread_mode == _RELAXED:
            return SUCCESS
        found = [capture for capture in self._open if capture.mode != _RELAXED]
        for capture in found:
            capture.is_invalid = True
        return UNSUPPORTED if found else SUCCESS

    def _of(self, stream: int) -> _Capture | None:
        return next((capture for capture in self._open if stream in capture.clocks), None)

    def _implicit(self, stream: int) -> int:
        """The legacy stream waits for all that are not cudaStreamNonBlocking, of which none may be capturing."""
        if stream not in _LEGACY and stream != AT_ONCE:
            return SUCCESS
        found = [one for one in self._open if any(_is_blocking(each) for each in one.clocks)]
        for capture in found:
            capture.is_invalid = True
        return IMPLICIT if found else SUCCESS

    # --- captures ----------------------------------------------------------------------------------------------------

    def capture_step(self, values: Values) -> int:
        """One of cudart.c's ``capture_step``s with its two operands; results go over ``values`` or to an address."""
        step, first, second = (int(value) for value in values[:3])
        capture = self._of(first)
        if step == _BEGIN:
            return self._begin(first, second)
        if step == _END:
            return self._end(first, values)
        if step == _STATUS:
            status = 0 if capture is None else 1 + capture.is_invalid
            ctypes.c_int.from_address(second).value = status
            values[2] = 0 if capture is None else capture.number
            return SUCCESS
        if step == _RECORD:
            if capture is None:
                self._events.pop(second, None)
                return self._implicit(first)
            self._events[second] = capture, dict(capture.clocks[first])
            return INVALIDATED if capture.is_invalid else SUCCESS
        if step == _WAIT:
            return self._wait(first, second, capture)
        if step == _LOOK_AT_STREAM:
            if capture is not None:
                capture.is_invalid = True
            return self._implicit(first) if capture is None else UNSUPPORTED
        if step == _LOOK_AT_EVENT:
            held = self._events.get(first)
            return CAPTURED_EVENT if held is not None and held[0] in self._open else SUCCESS
        if step == _LOOK_AT_DEVICE:
            return self.unsafe()
        if step == _EXCHANGE_MODE:
            mode = ctypes.c_int.from_address(first)
            self._thread_mode, mode.value = mode.value, self._thread_mode
            return SUCCESS
        raise ValueError(f"no step {step} of a capture")

    def _begin(self, stream: int, mode: int) -> int:
        if stream in _LEGACY:
            return UNSUPPORTED
        if self._of(stream) is not None:
            return ILLEGAL_STATE
        self._open.append(_Capture(next(self._numbers), stream, mode, clocks={stream: {}}))
        return SUCCESS

    def _end(self, stream: int, values: Values) -> int:
        """Results: the graph, and whether the capture has ended."""
        capture = self._of(stream)
        if capture is None:
            return ILLEGAL_STATE
        if stream != capture.origin:
            capture.is_invalid = True
            return UNMATCHED
        self._open.remove(capture)
        values[3] = 1
        error = INVALIDATED if capture.is_invalid else SUCCESS if capture.is_joined else UNJOINED
        if not error:
            values[2] = self._keep(capture.nodes)
        return error

    def _wait(self, stream: int, event: int, capture: _Capture | None) -> int:
        held = self._events.get(event)
        of_event = held[0] if held is not None and held[0] in self._open else None
        if of_event is None:
            return SUCCESS if capture is None else self._invalid(capture, ISOLATION)
        if capture is None:
            if stream in _LEGACY:
                return self._invalid(of_event, UNSUPPORTED)
            capture = of_event
            capture.clocks[stream] = {}
        if capture is not of_event:
            return self._invalid(capture, MERGE)
        clock = capture.clocks[stream]
        for each, count in held[1].items() if held is not None else ():
            clock[each] = max(clock.get(each, 0), count)
        return SUCCESS

    @staticmethod
    def _invalid(capture: _Capture, error: int) -> int:
        capture.is_invalid = True
        return error

    # --- graphs ------------------------------------------------------------------------------------------------------

    def graph_step(self, values: Values) -> int:
        """One of cudart.c's ``graph_step``s; its result goes to the first of ``values``."""
        step, first, second = (int(value) for value in values[:3])
        if step == _NODE_TYPE:
            if first not in self._node_types:
                return INVALID_VALUE
            values[0] = self._node_types[first]
            return SUCCESS
        nodes = self._graphs.get(first)
        if nodes is None:
            return INVALID_VALUE
        if step in (_INSTANTIATE, _CLONE):
            values[0] = self._keep(list(nodes))
        elif step == _LAUNCH:
            taken = list(nodes)
            return self.queue(second, Node("graph", lambda: _done(taken)))
        elif step == _UPDATE:
            other = self._graphs.get(second)
            if other is None:
                return INVALID_VALUE
            values[0] = _difference(nodes, other)
            if not values[0]:
                nodes[:] = other
        elif step == _NODES:
            return self._list(nodes, values)
        elif step == _DESTROY:
            self._destroy(first)
        else:
            raise ValueError(f"no step {step} of a graph")
        return SUCCESS

    def _keep(self, nodes: list[Node]) -> int:
        number = next(self._numbers)
        self._graphs[number] = nodes
        return number

    def _list(self, nodes: list[Node], values: Values) -> int:
        to, room = int(values[2]), int(values[3])
        if to:
            count = min(room, len(nodes))
            for at, node in enumerate(nodes[:count]):
                handle = next(self._numbers)
                self._node_types[handle] = _NODE_TYPES[node.kind]
                ctypes.c_uint64.from_address(to + 8 * at).value = handle
        values[0] = min(room, len(nodes)) if to else len(nodes)
        return SUCCESS

    def _destroy(self, number: int) -> None:
        """Memory that a graph made goes with the last one that uses it."""
        del self._graphs[number]
        kept = {id(node) for nodes in self._graphs.values() for node in nodes}
        for address, nodes in list(self._made.items()):
            is_captured = any(capture.nodes is nodes for capture in self._open)
            if not is_captured and not any(id(node) in kept for node in nodes):
                del self._made[address]
                self._release(address)


def _done(nodes: list[Node]) -> int:
    for node in nodes:
        error = node.do()
        if error:
            return error
    return SUCCESS


def _difference(old: list[Node], new: list[Node]) -> int:
    """What a ready graph cannot take over, as a cudaGraphExecUpdateResult; 0 for nothing."""
    if len(old) != len(new):
        return _TOPOLOGY_CHANGED
    if any(one.kind != other.kind for one, other in zip(old, new, strict=True)):
        return _TYPE_CHANGED
    return _FUNCTION_CHANGED * any(one.name != other.name for one, other in zip(old, new, strict=True))


def _is_blocking(stream: int) -> bool:
    """Whether the legacy stream waits for it: the first word of what cudart.c made says so."""
    return stream <= _PER_THREAD or bool(ctypes.c_uint.from_address(stream).value)
