"""A small valid request of each entry, at the real head counts of a model, as its ingredients before they are put
together: what a reject case spoils one of. Every array it owns has known contents, so that a stray write shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.device.interface import Allocation, Device, DeviceArray, contiguous_strides
from g4kv_cli.entries import prep
from g4kv_cli.entries.arguments import BF16, INT32, PagedBatch, PagedPool, PageRow, RopeTables
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.plan import PrefillPagedPlan
from g4kv_cli.entries.table import PREP_ENTRIES, PrepEntry
from g4kv_cli.inputs import PrepInputs, make_inputs, table_of
from g4kv_cli.model.geometry import GEOMETRIES, Geometry
from g4kv_cli.model.kv_layout import KvLayout
from g4kv_cli.model.prefill_plan import PlanRequest, PlanShape
from g4kv_cli.oracle.compare import POISON_BYTE

Array = npt.NDArray[Any]

OUTPUTS = ("q_out", "k_out", "pool")
"""Arrays that a launch writes: poison between cases."""

GEOMETRY_OF_ENTRY = {
    "qk_norm_rope_prefill_hd256_plain_into": "12b-local",
    "qkv_norm_rope_paged_prefill_hd256_plain_into": "e4b-local",
    "qkv_norm_rope_paged_decode_hd256_plain_into": "12b-local",
    "qkv_norm_rope_paged_prefill_hd512_plain_into": "e2b-global",
    "qkv_norm_rope_paged_decode_hd512_plain_into": "e4b-global",
    "qk_norm_rope_paged_prefill_hd512_k_eq_v_plain_into": "12b-global",
    "qk_norm_rope_paged_decode_hd512_k_eq_v_plain_into": "31b-global",
    "qkv_norm_rope_paged_batch_prefill_hd256_plain_into": "26b-a4b-local",
    "qkv_norm_rope_paged_batch_prefill_hd512_plain_into": "e4b-global",
    "qk_norm_rope_paged_batch_prefill_hd512_k_eq_v_plain_into": "26b-a4b-global",
}
"""The head counts that each entry's cases use."""

PAGE_SIZE = 4
NUM_PAGES = 7
NUM_LAYERS = 2
LAYER = 1
TABLE_POSITIONS = 16
WINDOW_LEFT = 3
SEED = 3

START_POS = 3
PREFILL_TOKENS = 5
"""Positions 3..7: slot 3 of the first page, then a whole page."""
PAGE_ROW = (2, 6)

DECODE_POSITIONS = (0, 5, 7, 9)
DECODE_PAGES = ((0,), (1, 2), (3,), (4, 6))
DECODE_ORIGINS = (0, 0, 1, 1)

PLAN_REQUESTS = (
    PlanRequest(start_pos=3, q_len=2, page_indices=(5, 2), last_page_len=1),
    PlanRequest(start_pos=0, q_len=3, page_indices=(1,), last_page_len=3),
    PlanRequest(start_pos=9, q_len=1, page_indices=(3, 6), last_page_len=2, page_origin=1),
)
"""A chunk over a page boundary, a fresh prompt, and a windowed request whose first page is released."""
PLAN_POSITIONS = (3, 4, 0, 1, 2, 9)


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
    rope: Any
    layout: Any = None
    pool_data: Any = None
    page_ids: Any = PAGE_ROW
    positions: Any = DECODE_POSITIONS
    page_lists: Any = DECODE_PAGES
    page_origins: Any = DECODE_ORIGINS
    padding_page: Any = None
    requests: Any = PLAN_REQUESTS
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
        arguments = self.arguments | {"rope": self.rope}
        if entry.form != "contiguous":
            pool = self.replaced.get("pool", PagedPool(self.layout, self.pool_data))
            arguments |= {"pool": pool}
        if entry.form == "paged_prefill":
            arguments["page_row"] = self.page_row()
        elif entry.form == "paged_decode":
            arguments["batch"] = self.batch()
        elif entry.form == "paged_batch_prefill":
            arguments["plan"] = self.plan()
        getattr(prep, entry.name)(self.library, **arguments)

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
            self.replaced["plan"] = self.keep(PrefillPagedPlan.batch(self.device, self.requests, shape=self.shape))
        return self.replaced["plan"]

    def written_elems(self) -> dict[str, int]:
        """Elements of each output that are not poison any more."""
        outputs = {name: self.arguments[name] for name in OUTPUTS if name in self.arguments}
        if self.bench.entry.form != "contiguous":
            outputs["pool"] = self.pool_data
        return {
            name: int(np.count_nonzero(self.device.read(array).view(np.uint16) != 0xFFFF))
            for name, array in outputs.items()
        }

    def expected_elems(self) -> dict[str, int]:
        """What ``written_elems`` is after the launch of a request in range."""
        geometry, tokens = self.bench.geometry, self.bench.tokens
        slots = tokens if self.written_slots is None else self.written_slots
        expected = {"q_out": tokens * geometry.num_qo_heads * geometry.head_dim}
        if self.bench.entry.form == "contiguous":
            expected["k_out"] = tokens * geometry.num_kv_heads * geometry.head_dim
        else:
            expected["pool"] = 2 * slots * geometry.num_kv_heads * geometry.head_dim
        return expected

    def keep(self, made: Any) -> Any:
        """Remember something on the device for the end of the case; it is returned."""
        self.made.append(made)
        return made

    def array(self, name: str) -> DeviceArray:
        """An array argument by the name that errors give it."""
        if name in ("rope.cos", "rope.sin"):
            return getattr(self.rope, name[5:])  # type: ignore[no-any-return]
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

    def release(self) -> None:
        """Free what the case made."""
        for made in self.made:
            if isinstance(made, PrefillPagedPlan):
                arrays = list(made.buffers.by_name().values())
            elif isinstance(made, PageRow):
                arrays = [made.indices]
            elif isinstance(made, PagedBatch):
                arrays = [made.positions, made.page_indices, made.page_indptr, made.page_origins]
            else:
                arrays = [made]
            for array in arrays:
                if not array.allocation.freed:
                    array.device.free(array)


Change = Callable[[Draft], None]


@dataclass(frozen=True, slots=True)
class Spoiled:
    """One way to contradict the contract, and its in-range twin.

    ``change`` spoils a draft so that rule ``rule`` refuses ``field``; ``twin`` changes it just as far as is allowed
    (None: the unchanged request is the twin). ``applies`` says to which entries it can be done.
    """

    rule: str
    variant: str
    field: str
    change: Change
    twin: Change | None = None
    applies: Callable[[PrepEntry], bool] = lambda entry: True


class RejectBench:
    """One entry's valid request on a device: arrays made once, and drafts of the call that use them."""

    def __init__(self, library: KernelLibrary, entry_name: str, foreign: Device) -> None:
        self.library = library
        self.device = library.device
        self.foreign = foreign
        self.entry = PREP_ENTRIES[entry_name]
        self.geometry = GEOMETRIES[GEOMETRY_OF_ENTRY[entry_name]]
        self.claimed_bytes = 0
        self._arrays: dict[str, DeviceArray] = {}
        self._contents: dict[str, Array] = {}
        self.layout: KvLayout | None = None
        self.inputs = self._make()

    @property
    def tokens(self) -> int:
        """Token rows of the request."""
        return len(self.positions)

    @property
    def positions(self) -> tuple[int, ...]:
        """Position of each token."""
        if self.entry.form == "paged_decode":
            return DECODE_POSITIONS
        if self.entry.form == "paged_batch_prefill":
            return PLAN_POSITIONS
        return tuple(range(START_POS, START_POS + PREFILL_TOKENS))

    @property
    def pool(self) -> DeviceArray | None:
        """The pool, None in the contiguous form."""
        return self._arrays.get("pool")

    def draft(self) -> Draft:
        """The unspoiled call."""
        arguments: dict[str, Any] = {
            name: array for name, array in self._arrays.items() if name not in ("cos", "sin", "pool")
        }
        arguments["rotary_dim"] = self.geometry.rotary_dim
        if self.entry.form in ("contiguous", "paged_prefill"):
            arguments["start_pos"] = START_POS
        if self.entry.form != "contiguous":
            arguments["layer"] = LAYER
        return Draft(
            bench=self,
            library=self.library,
            arguments=arguments,
            rope=RopeTables(self._arrays["cos"], self._arrays["sin"]),
            layout=self.layout,
            pool_data=self._arrays.get("pool"),
            shape=PlanShape(
                num_qo_heads=self.geometry.num_qo_heads,
                num_kv_heads=self.geometry.num_kv_heads,
                head_dim=self.geometry.head_dim,
                page_size=PAGE_SIZE,
                window_left=WINDOW_LEFT,
            ),
        )

    def changed_arrays(self) -> list[str]:
        """Names of arrays whose bytes are not what they were made with."""
        return [
            name
            for name, array in self._arrays.items()
            if self.device.read(array).tobytes() != self._contents[name].tobytes()
        ]

    def poison_outputs(self) -> None:
        """Fill all outputs with the poison again."""
        for name, array in self._arrays.items():
            if name in OUTPUTS:
                self.device.fill(array, POISON_BYTE)

    def close(self) -> None:
        """Free the arrays."""
        self.device.free_all(list(self._arrays.values()))

    def _make(self) -> PrepInputs:
        geometry, tokens = self.geometry, self.tokens
        inputs = make_inputs(
            geometry,
            "closed-form",
            seed=SEED,
            positions=self.positions,
            rotary_dim=geometry.rotary_dim,
            table_positions=TABLE_POSITIONS,
            with_v=self.entry.value_source == "raw_v",
        )
        # Every row of the tables is real: a twin moves its tokens to other positions.
        rows = make_inputs(
            geometry,
            "closed-form",
            seed=SEED,
            positions=range(TABLE_POSITIONS),
            rotary_dim=geometry.rotary_dim,
            table_positions=TABLE_POSITIONS,
            with_v=False,
        )
        self._upload("q", inputs.q)
        self._upload("k", inputs.k)
        if inputs.v is not None:
            self._upload("v", inputs.v)
        self._upload("q_norm_weight", inputs.q_weight)
        self._upload("k_norm_weight", inputs.k_weight)
        self._upload("cos", table_of(rows.cos, rows.positions, TABLE_POSITIONS))
        self._upload("sin", table_of(rows.sin, rows.positions, TABLE_POSITIONS))
        self._poisoned("q_out", (tokens, geometry.num_qo_heads, geometry.head_dim))
        if self.entry.form == "contiguous":
            self._poisoned("k_out", (tokens, geometry.num_kv_heads, geometry.head_dim))
        else:
            self.layout = reject_layout(geometry)
            self._poisoned("pool", (self.layout.pool_elems(NUM_PAGES),))
        return inputs

    def _upload(self, name: str, values: Array) -> None:
        self._contents[name] = values
        self._arrays[name] = self.device.upload(values, name)

    def _poisoned(self, name: str, shape: tuple[int, ...]) -> None:
        self._contents[name] = np.full(shape, 0xFFFF, np.uint16)
        self._arrays[name] = self.device.allocate(shape, BF16, name)
        self.device.fill(self._arrays[name], POISON_BYTE)


def reject_layout(geometry: Geometry) -> KvLayout:
    """The pool's layout of all reject and trap cases of a geometry."""
    return KvLayout.derive(
        page_size=PAGE_SIZE,
        num_layers=NUM_LAYERS,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
    )


def array_names(entry: PrepEntry) -> tuple[str, ...]:
    """The array arguments of an entry, by the names that errors give them."""
    names = ["q", "k"]
    names += ["v"] if entry.value_source == "raw_v" else []
    names += ["q_norm_weight", "k_norm_weight", "rope.cos", "rope.sin", "q_out"]
    names += {
        "contiguous": ["k_out"],
        "paged_prefill": ["pool", "page_row"],
        "paged_decode": ["pool", "positions", "page_indices", "page_indptr", "page_origins"],
        "paged_batch_prefill": ["pool"],
    }[entry.form]
    return tuple(names)


def dtype_of(name: str) -> np.dtype[Any]:
    """The element type of an array argument."""
    return INT32 if name in ("page_row", "positions", "page_indices", "page_indptr", "page_origins") else BF16
