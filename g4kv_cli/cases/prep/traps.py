"""Smoke's traps: metadata that only the device can see is wrong, and the kernel must stop before it writes.

The host checks what it knows; behind it, the kernels trap on what a device-made row or batch says. Each case breaks
one rule, and is built so that without the trap a plausible wrong slot, or memory past an array, would be touched.
One token each: then nothing at all may be written to the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from g4kv_cli.cases.prep.case import Case, Placement, RawMetadata
from g4kv_cli.entries.table import entry_for
from g4kv_cli.model.geometry import Geometry

_NUM_PAGES = 4
_TABLE_SPARE_ROWS = 3

_Builder = Callable[[Geometry, int], Iterator[Case]]


def trap_cases(geometries: Sequence[Geometry], page_size: int, *, once_an_entry: bool) -> list[Case]:
    """Every rule for every geometry, or once for each entry: its first geometry then stands for the others."""
    cases: list[Case] = []
    seen: set[str] = set()
    for geometry in geometries:
        forms: tuple[tuple[str, _Builder], ...] = (
            ("prefill", _prefill),
            ("decode", _decode),
            ("batch_prefill", _batch_prefill),
        )
        for form, build in forms:
            entry = entry_for(geometry, "prep", form).name
            if not once_an_entry or entry not in seen:
                seen.add(entry)
                cases.extend(build(geometry, page_size))
    return cases


def _prefill(geometry: Geometry, page_size: int) -> Iterator[Case]:
    # One token in the request's second page.
    yield _case(geometry, "prefill", "page-id-negative", page_size, RawMetadata((2, -1)))
    yield _case(geometry, "prefill", "page-id-past-pool", page_size, RawMetadata((2, _NUM_PAGES)))


def _decode(geometry: Geometry, page_size: int) -> Iterator[Case]:
    position = page_size  # the first slot of the second page
    table = page_size + 1 + _TABLE_SPARE_ROWS

    def case(name: str, indices: tuple[int, ...], indptr: tuple[int, int], origin: int = 0, at: int = position) -> Case:
        return _case(geometry, "decode", name, page_size, RawMetadata(indices, at, indptr, origin))

    yield case("position-negative", (2, 1), (0, 2), at=-1)
    # Enough pages for it: only the RoPE table ends.
    yield case("position-past-table", (2, 1, 3), (0, 3), at=table, origin=table // page_size)
    yield case("page-id-negative", (2, -1), (0, 2))
    yield case("page-id-past-pool", (2, _NUM_PAGES), (0, 2))
    yield case("row-begin-negative", (2, 1), (-1, 2))
    yield case("row-ends-before-it-begins", (2, 1, 3), (2, 1), origin=1)
    yield case("row-past-the-array", (2, 1), (0, 3))
    # Index 2 exists and names a page of the pool, but a wrong one.
    yield case("origin-negative", (2, 1, 3), (0, 3), origin=-1)
    yield case("origin-past-position", (2, 1), (1, 2), origin=2)
    # The array goes on with another request's page.
    yield case("row-too-short", (2, 1), (0, 1))


def _batch_prefill(geometry: Geometry, page_size: int) -> Iterator[Case]:
    for name, request in (("request-negative", -1), ("request-past-the-batch", 1)):
        yield _case(geometry, "batch_prefill", name, page_size, RawMetadata((2, 1), token_request=request))


def _case(geometry: Geometry, form: str, name: str, page_size: int, metadata: RawMetadata) -> Case:
    return Case(
        id=f"trap/{geometry.name}/{form}/{name}",
        entry=entry_for(geometry, "prep", form).name,
        geometry=geometry,
        form=form,
        kind="random",
        seed=1,
        positions=(page_size,),
        rotary_dim=geometry.rotary_dim,
        table_positions=page_size + 1 + _TABLE_SPARE_ROWS,
        placement=Placement(page_size, _NUM_PAGES, 2, 1, ((2, 1),), (0,)),
        trap=metadata,
        requests=((page_size, 1),) if form == "batch_prefill" else (),
    )
