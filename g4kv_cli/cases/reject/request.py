"""A small valid request of each entry, at the real head counts of a model, as its ingredients before they are put
together: what a reject case spoils one of. Every array it owns has known contents, so that a stray write shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.cases.reject.valid import (
    DECODE_ORIGINS,
    DECODE_PAGES,
    DECODE_POSITIONS,
    LAYER,
    NUM_PAGES,
    NUM_SPLITS,
    PAGE_ROW,
    PAGE_SIZE,
    PREFILL_TOKENS,
    SEED,
    START_POS,
    TABLE_POSITIONS,
    WINDOW_LEFT,
    plan_positions,
    plan_requests,
    reject_layout,
)
from g4kv_cli.device.interface import Allocation, Device, DeviceArray, contiguous_strides
from g4kv_cli.entries.arguments import BF16, FLOAT32, PagedBatch, PagedPool, PageRow, RopeTables
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.entries.workspace import SplitWorkspace
from g4kv_cli.inputs import PrepInputs, make_inputs, table_of
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.plan_request import PlanShape
from g4kv_cli.oracle.compare import POISON_BYTE

Array = npt.NDArray[Any]

OUTPUTS = ("q_out", "k_out", "out", "lse")
"""Arguments that a launch writes, beside the pool of a prep entry: poison between cases."""


@dataclass(slots=True)
class Draft:
    """The ingredients of one call. A case changes some of them; ``call`` puts them together and calls the entry.

    ``arguments`` are the entry's keyword arguments that need no making. ``replaced`` holds a ``pool``, ``page_row``,
    ``batch`` or ``plan`` in place of the one that would be made of the numbers. ``written_slots``: tokens whose K and
    V end in a slot of their own, None for all.
    """

    bench: RejectBench
    library: Any
    arguments: dict[str, Any]
    rope: Any = None
    workspace: Any = None
    layout: Any = None
    pool_data: Any = None
    page_ids: Any = PAGE_ROW
    positions: Any = DECODE_POSITIONS
    page_lists: Any = DECODE_PAGES
    page_origins: Any = DECODE_ORIGINS
    padding_page: Any = None
    requests: Any = ()
    shape: Any = None
    written_slots: int | None = None
    replaced: dict[str, Any] = dataclasses.field(default_factory=dict)
    made: list[Any] = dataclasses.field(default_factory=list)

    @property
    def device(self) -> Device:
        """The device of the bench."""
        return self.bench.device

    def call(self) -> None:
        """Make the metadata and call the entry."""
        entry = self.bench.entry
        arguments = dict(self.arguments)
        if entry.is_prep:
            arguments["rope"] = self.rope
        if entry.has_pool:
            arguments["pool"] = self.replaced.get("pool", PagedPool(self.layout, self.pool_data))
        if entry.metadata == "page_row":
            arguments["page_row"] = self.page_row()
        elif entry.metadata == "batch":
            arguments["batch"] = self.batch()
        elif entry.takes_plan:
            arguments["plan"] = self.plan()
        if entry.takes_splits:
            arguments["workspace"] = self.workspace
        entry(self.library, **arguments)

    def page_row(self) -> Any:
        """The prefill form's row."""
        if "page_row" not in self.replaced:
            self.keep(PageRow.from_host(self.device, self.page_ids))
            self.replaced["page_row"] = self.made[-1]
        return self.replaced["page_row"]

    def batch(self) -> Any:
        """The decode form's metadata."""
        if "batch" not in self.replaced:
            made = PagedBatch.from_host(
                self.device,
                positions=self.positions,
                page_lists=self.page_lists,
                page_origins=self.page_origins,
                padding_page=self.padding_page,
            )
            self.replaced["batch"] = self.keep(made)
        return self.replaced["batch"]

    def plan(self) -> Any:
        """The batch form's plan."""
        if "plan" not in self.replaced:
            plan = PrefillPagedPlan.batch(self.device, self.requests, shape=self.shape, padding_page=self.padding_page)
            self.replaced["plan"] = self.keep(plan)
        return self.replaced["plan"]

    def written_elems(self) -> dict[str, int]:
        """Elements of each output that are not poison any more."""
        outputs = {name: self.arguments[name] for name in OUTPUTS if name in self.arguments}
        if self.bench.entry.writes_pool:
            outputs["pool"] = self.pool_data
        return {
            name: int(np.count_nonzero(self.device.read(array).view(f"u{array.dtype.itemsize}") != _poison_of(array)))
            for name, array in outputs.items()
        }

    def expected_elems(self) -> dict[str, int]:
        """What ``written_elems`` is after the launch of a request in range."""
        entry, geometry, tokens = self.bench.entry, self.bench.geometry, self.bench.tokens
        query_elems = tokens * geometry.num_qo_heads * geometry.head_dim
        if not entry.is_prep:
            return {"out": query_elems, "lse": tokens * geometry.num_qo_heads}
        expected = {"q_out": query_elems}
        slots = tokens if self.written_slots is None else self.written_slots
        if entry.writes_pool:
            k_dim = getattr(self.layout, "k_dim", geometry.head_dim)
            expected["pool"] = slots * geometry.num_kv_heads * (k_dim + geometry.head_dim)
        else:
            expected["k_out"] = tokens * geometry.num_kv_heads * geometry.head_dim
        return expected

    def keep(self, made: Any) -> Any:
        """Remember something on the device for the end of the case; it is returned."""
        self.made.append(made)
        return made

    def array(self, name: str) -> DeviceArray:
        """An array argument by the name that errors give it."""
        if name in ("rope.cos", "rope.sin"):
            return getattr(self.rope, name[5:])  # type: ignore[no-any-return]
        if name.startswith("workspace."):
            return getattr(self.workspace, name[10:])  # type: ignore[no-any-return]
        if name == "pool":
            return self.pool_data  # type: ignore[no-any-return]
        if name == "page_row":
            return self.page_row().indices  # type: ignore[no-any-return]
        if name in ("positions", "page_indices", "page_indptr", "page_origins"):
            return getattr(self.batch(), name)  # type: ignore[no-any-return]
        return self.arguments[name]  # type: ignore[no-any-return]

    def replace_array(self, name: str, value: Any) -> None:
        """Put another array (or what should be one) in an argument's place."""
        if name in ("rope.cos", "rope.sin"):
            self.rope = dataclasses.replace(self.rope, **{name[5:]: value})
        elif name.startswith("workspace."):
            self.workspace = dataclasses.replace(self.workspace, **{name[10:]: value})
        elif name == "pool":
            self.pool_data = value
        elif name == "page_row":
            self.replaced["page_row"] = dataclasses.replace(self.page_row(), indices=value)
        elif name in ("positions", "page_indices", "page_indptr", "page_origins"):
            self.replaced["batch"] = dataclasses.replace(self.batch(), **{name: value})
        else:
            self.arguments[name] = value

    def fresh(self, shape: tuple[int, ...], dtype: npt.DTypeLike = BF16) -> DeviceArray:
        """Memory of its own for the length of the case, zeros."""
        array: DeviceArray = self.keep(self.device.allocate(shape, dtype, "a case's array"))
        self.device.fill(array, 0)
        return array

    def claimed(self, shape: tuple[int, ...], dtype: npt.DTypeLike = BF16) -> DeviceArray:
        """An array that says it has memory it has not: for extents no machine holds. Never to be launched with."""
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        # Each at a place of its own, far from any real address, so that no two overlap.
        self.bench.claimed_bytes += (nbytes + 255) // 256 * 256
        allocation = Allocation(self.device, (1 << 70) + self.bench.claimed_bytes, nbytes, "a claimed array")
        return DeviceArray(allocation, 0, shape, kind, contiguous_strides(shape, kind.itemsize))

    def own_arrays(self) -> Iterator[DeviceArray]:
        """The arrays of what the case made."""
        for made in self.made:
            if isinstance(made, PrefillPagedPlan):
                arrays = list(made.buffers.by_name().values())
            elif isinstance(made, PageRow):
                arrays = [made.indices]
            elif isinstance(made, PagedBatch):
                arrays = [made.positions, made.page_indices, made.page_indptr, made.page_origins]
            else:
                arrays = [made]
            yield from (array for array in arrays if not array.allocation.freed)

    def release(self) -> None:
        """Free what the case made."""
        for array in list(self.own_arrays()):
            array.device.free(array)


Change = Callable[[Draft], None]


@dataclass(frozen=True, slots=True)
class Spoiled:
    """One way to contradict the contract, and its in-range twin.

    ``change`` spoils a draft so that rule ``rule`` refuses ``field``; ``twin`` changes it just as far as is allowed
    (None: the unchanged request is the twin).
    """

    rule: str
    variant: str
    field: str
    change: Change
    twin: Change | None = None


class RejectBench:
    """One entry's valid request on a device: arrays made once, and drafts of the call that use them."""

    def __init__(self, library: KernelLibrary, entry: Entry, geometry: Geometry, foreign: Device) -> None:
        self.library = library
        self.device = library.device
        self.foreign = foreign
        self.entry = entry
        self.geometry = geometry
        self.claimed_bytes = 0
        self.last_draft: Draft | None = None
        self._arrays: dict[str, DeviceArray] = {}
        self._contents: dict[str, bytes] = {}
        self.layout = reject_layout(self.geometry) if self.entry.has_pool else None
        if self.entry.is_prep:
            self._make_prep()
        else:
            self._make_attention()

    @property
    def tokens(self) -> int:
        """Token rows of the request."""
        return len(self.positions)

    @property
    def positions(self) -> tuple[int, ...]:
        """Position of each token."""
        if self.entry.metadata == "batch":
            return DECODE_POSITIONS
        if self.entry.takes_plan or not self.entry.is_prep:
            return plan_positions(plan_requests(self.entry))
        return tuple(range(START_POS, START_POS + PREFILL_TOKENS))

    @property
    def pool(self) -> DeviceArray | None:
        """The pool, None in the contiguous form."""
        return self._arrays.get("pool")

    def draft(self) -> Draft:
        """The unspoiled call."""
        entry, arrays = self.entry, self._arrays
        apart = ("cos", "sin", "pool", "partial_out", "partial_max", "partial_sum")
        draft = Draft(
            bench=self,
            library=self.library,
            arguments={name: array for name, array in arrays.items() if name not in apart},
            layout=self.layout,
            pool_data=arrays.get("pool"),
            requests=plan_requests(entry),
            shape=PlanShape(
                num_qo_heads=self.geometry.num_qo_heads,
                num_kv_heads=self.geometry.num_kv_heads,
                head_dim=self.geometry.head_dim,
                page_size=PAGE_SIZE,
                window_left=WINDOW_LEFT,
            ),
        )
        if entry.is_prep:
            draft.rope = RopeTables(arrays["cos"], arrays["sin"])
            draft.arguments["rotary_dim"] = self.geometry.rotary_dim
        if entry.is_prep and entry.metadata in ("none", "page_row"):
            draft.arguments["start_pos"] = START_POS
        if entry.has_pool:
            draft.arguments["layer"] = LAYER
        if entry.takes_splits:
            draft.arguments["num_splits"] = NUM_SPLITS
            draft.workspace = SplitWorkspace(arrays["partial_out"], arrays["partial_max"], arrays["partial_sum"])
        self.last_draft = draft
        return draft

    def at_hand(self) -> list[DeviceArray]:
        """Its arrays, and those that the last draft made."""
        made = [] if self.last_draft is None else list(self.last_draft.own_arrays())
        return [*self._arrays.values(), *made]

    def changed_arrays(self) -> list[str]:
        """Names of arrays whose bytes are not what they were made with."""
        return [
            name for name, array in self._arrays.items() if self.device.read(array).tobytes() != self._contents[name]
        ]

    def restore_outputs(self) -> None:
        """Fill with the poison again what a launch writes."""
        for name, array in self._arrays.items():
            if self._writes(name):
                self.device.fill(array, POISON_BYTE)

    def close(self) -> None:
        """Free the arrays."""
        self.device.free_all(list(self._arrays.values()))

    def _make_prep(self) -> None:
        geometry, tokens = self.geometry, self.tokens

        def inputs(positions: Sequence[int]) -> PrepInputs:
            return make_inputs(
                geometry,
                "closed-form",
                seed=SEED,
                positions=positions,
                rotary_dim=geometry.rotary_dim,
                table_positions=TABLE_POSITIONS,
                with_v=self.entry.has_v_input,
            )

        own = inputs(self.positions)
        # Every row of the tables is real: a twin moves its tokens to other positions.
        every = inputs(range(TABLE_POSITIONS))
        self._upload("q", own.q)
        self._upload("k", own.k)
        if own.v is not None:
            self._upload("v", own.v)
        self._upload("q_norm_weight", own.q_weight)
        self._upload("k_norm_weight", own.k_weight)
        self._upload("cos", table_of(every.cos, every.positions, TABLE_POSITIONS))
        self._upload("sin", table_of(every.sin, every.positions, TABLE_POSITIONS))
        self._poisoned("q_out", (tokens, geometry.num_qo_heads, geometry.head_dim))
        if self.layout is None:
            self._poisoned("k_out", (tokens, geometry.num_kv_heads, geometry.head_dim))
        else:
            self._poisoned("pool", (self.layout.pool_elems(NUM_PAGES),))

    def _make_attention(self) -> None:
        geometry, rows = self.geometry, (self.tokens, self.geometry.num_qo_heads)
        random = np.random.Generator(np.random.PCG64(SEED))
        if self.layout is not None:
            self._upload("q", random.standard_normal((*rows, geometry.head_dim), np.float32).astype(BF16))
            # Every slot is finite, those of other pages and layers too: which of them a twin reads is its own affair.
            self._upload("pool", random.standard_normal(self.layout.pool_elems(NUM_PAGES), np.float32).astype(BF16))
        self._poisoned("out", (*rows, geometry.head_dim))
        self._poisoned("lse", rows, FLOAT32)
        if not self.entry.takes_splits:
            return
        for name, shape in (
            ("partial_out", (*rows, NUM_SPLITS, geometry.head_dim)),
            ("partial_max", (*rows, NUM_SPLITS)),
            ("partial_sum", (*rows, NUM_SPLITS)),
        ):
            if self._writes(name):
                self._poisoned(name, shape, FLOAT32)
            else:
                # The merge reads them: sums are above zero.
                self._upload(name, 0.5 + random.random(shape, np.float32))

    def _writes(self, name: str) -> bool:
        """True for an array that a launch writes."""
        if name == "pool":
            return self.entry.writes_pool
        return name in OUTPUTS or (name.startswith("partial_") and self.entry.operation != "merge")

    def _upload(self, name: str, values: Array) -> None:
        self._contents[name] = values.tobytes()
        self._arrays[name] = self.device.upload(values, name)

    def _poisoned(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike = BF16) -> None:
        array = self._arrays[name] = self.device.allocate(shape, dtype, name)
        self._contents[name] = bytes([POISON_BYTE]) * array.nbytes
        self.device.fill(array, POISON_BYTE)


def _poison_of(array: DeviceArray) -> int:
    """The poison as one unsigned element."""
    return int.from_bytes(bytes([POISON_BYTE]) * array.dtype.itemsize, "little")
