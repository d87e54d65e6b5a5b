"""wgmma: matrix products of a warpgroup (four warps), asynchronous, with operands in shared memory or registers.

Layouts as recorded from an NVIDIA H200. Shared operands are tiles with a swizzle of W = 128, 64 or 32 bytes, which is
taken of absolute shared addresses, or with none; with S the descriptor's start, SBO and LBO its strides in bytes:

* K-major, row r (of M or N), element k:  S + (r / 8) SBO + (r % 8) W + 2 k, LBO without effect;
* MN-major, element r of row k:           S + (r / (W/2)) LBO + (k / 8) SBO + (k % 8) W + 2 (r % (W/2));
* K-major without swizzle:                S + (r / 8) SBO + (k / 8) LBO + (r % 8) 16 + 2 (k % 8);
* MN-major without swizzle:               S + (r / 8) SBO + (k / 8) LBO + (k % 8) 16 + 2 (r % 8).

LBO has no effect up to W/2 rows. That is of types of 16 bits; a row of any other type has 32 bytes too, and is K-major.

Warp w computes rows 16 w to 16 w + 15 of the 64; accumulator register i of lane 4 g + t is row 8 ((i / 2) % 2) + g,
column 8 (i / 4) + 2 t + i % 2 of those; register i of f16 has those of 2 i and 2 i + 1. A registers are those of
mma.sync m16n8 of the type.

Operands are read at issue, but destination registers hold *placeholders* until a wait_group of the warp: NaNs that no
arithmetic gives, each standing for one register of one instruction. A later wgmma may take them as its accumulators;
whatever else reads them early gets a NaN, which is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arithmetic.mma_forms import ELEMENT_BITS, Form, multiply
from ..checks.clock_races import ClockRaces
from ..checks.shared_races import READ
from ..faults import UnsupportedOpcode
from ..memory.access import span_of
from ..memory.shared_memory import SharedMemory
from ..ptx.sites import Site
from ..state.lanes import WARP, ChunkState, LaneSet

Array = npt.NDArray[Any]
Units = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
U32 = npt.NDArray[np.uint32]

DEPTH = 16
"""k of one instruction on 16-bit types: rows of A and B have 32 bytes, whatever the type."""
WARP_ROWS = 16
WARPS_PER_GROUP = 4
_CHUNK_SHIFT = 4
_CHUNK_BYTES = 1 << _CHUNK_SHIFT
_SPAN_BYTES = (16, 128, 64, 32)
"""Of a row of a tile, by bits 62 and 63 of the descriptor: the swizzle's, or a chunk where there is none."""

_PLACEHOLDER = np.uint32(0xFFA00000)
_PLACEHOLDER_MASK = np.uint32(0xFFE00000)
_REGISTER_BITS = 7
_SERIALS = 1 << 14
"""A placeholder is 0xffa00000 + instruction number modulo this << 7 + register: negative signalling NaNs."""


@dataclass(frozen=True, eq=False)
class Pending:
    """Results of one executed instruction: ``values`` [registers, lanes], ``group`` the commit group of each lane."""

    values: U32
    row: npt.NDArray[np.int32]
    """Column of ``values`` of each lane of the chunk, -1 for others."""
    group: npt.NDArray[np.int32]
    lanes: LaneSet


class Wgmmas:
    """The wgmma instructions of a chunk that were not waited for."""

    def __init__(self, chunk: ChunkState) -> None:
        self.chunk = chunk
        self.pending: dict[int, Pending] = {}
        self.issued = 0
        self.committed = np.zeros(chunk.lane_count, np.int32)
        self.executed = np.zeros(chunk.lane_count // WARP, np.int64)
        self.site: Site | None = None

    def issue(self, lanes: LaneSet, values: U32, site: Site) -> list[U32]:
        """Queue results [registers, lanes]; returns the placeholders."""
        serial = self.issued % _SERIALS
        if serial in self.pending:
            raise ValueError(f"more than {_SERIALS} wgmma without a wait_group")
        self.issued += 1
        self.site = site
        row = np.full(self.chunk.lane_count, -1, np.int32)
        row[lanes.index] = np.arange(lanes.count)
        self.pending[serial] = Pending(values, row, self.committed.take(lanes.index), lanes)
        self.executed[lanes.warps] += 1
        first = int(_PLACEHOLDER) + (serial << _REGISTER_BITS)
        return [np.full(lanes.count, first + register, np.uint32) for register in range(len(values))]

    def commit(self, lanes: LaneSet) -> None:
        """wgmma.commit_group."""
        self.committed[lanes.index] += 1

    def wait(self, lanes: LaneSet, open_groups: int, registers: tuple[U32, ...]) -> tuple[U32, ...]:
        """wgmma.wait_group: the registers with the placeholders of finished instructions replaced."""
        limit = self.committed - np.int32(open_groups)
        results = tuple(self.resolve(lanes, register, limit) for register in registers)
        here = np.zeros(self.chunk.lane_count, np.bool_)
        here[lanes.index] = True
        for serial, pending in list(self.pending.items()):
            index = pending.lanes.index
            if (here[index] & (pending.group < limit[index])).all():
                del self.pending[serial]
        races: ClockRaces = self.chunk.races
        warps = lanes.warps
        races.group_done(warps, races.wgmma_agent(warps % races.warps), limit[warps * WARP])
        return results

    def resolve(self, lanes: LaneSet, register: U32, limit: npt.NDArray[np.int32] | None) -> U32:
        """A register with placeholders replaced: those below the lanes' group limit, or all."""
        if register.shape[0] == 1:
            return register
        whole = self._whole(lanes, register, limit)
        if whole is not None:
            return whole
        held = (register & _PLACEHOLDER_MASK) == _PLACEHOLDER
        if not held.any():
            return register
        out = register.copy()
        tokens = register - _PLACEHOLDER
        serials = np.where(held, tokens >> _REGISTER_BITS, _SERIALS)
        for serial in np.unique(serials[held]):
            pending = self.pending.get(int(serial))
            if pending is None:
                continue
            at = np.flatnonzero(serials == serial)
            column = pending.row.take(lanes.index.take(at))
            good = column >= 0
            if limit is not None:
                good &= pending.group.take(column) < limit.take(lanes.index.take(at))
            at, column = at[good], column[good]
            out[at] = pending.values[tokens[at] & np.uint32((1 << _REGISTER_BITS) - 1), column]
        return out

    def _whole(self, lanes: LaneSet, register: U32, limit: npt.NDArray[np.int32] | None) -> U32 | None:
        """The usual case: one placeholder in all lanes of a finished instruction of the same lanes."""
        token = int(register[0]) - int(_PLACEHOLDER)
        if not 0 <= token < _SERIALS << _REGISTER_BITS:
            return None
        pending = self.pending.get(token >> _REGISTER_BITS)
        if pending is None or pending.lanes.count != lanes.count or not (register == register[0]).all():
            return None
        if not np.array_equal(pending.lanes.index, lanes.index):
            return None
        if limit is not None and not (pending.group < limit.take(lanes.index)).all():
            return None
        values: U32 = pending.values[token & ((1 << _REGISTER_BITS) - 1)]
        return values

    def report_uneven(self) -> None:
        """The blocks have ended: report warpgroups whose warps did not execute the same instructions."""
        if self.site is None:
            return
        table = self.executed.reshape(self.chunk.block_count, -1)
        padded = np.pad(table, ((0, 0), (0, -table.shape[1] % WARPS_PER_GROUP)))
        groups = padded.reshape(self.chunk.block_count, -1, WARPS_PER_GROUP)
        bad = np.argwhere((groups != groups[:, :, :1]).any(2))
        if bad.size:
            slot, group = (int(number) for number in bad[0])
            lane = (slot * table.shape[1] + group * WARPS_PER_GROUP) * WARP
            counts = ", ".join(str(int(count)) for count in groups[slot, group])
            self.chunk.run.collector.add(
                "divergent_barrier",
                f"the warps of warpgroup {group} executed {counts} wgmma; all four must execute each",
                self.site,
                LaneSet(self.chunk, np.array([lane])),
                0,
                len(bad),
            )


@dataclass(frozen=True)
class Shape:
    """One wgmma instruction form. ``columns`` is N; negations are those of scale-a and scale-b -1."""

    columns: int
    form: Form
    a_in_registers: bool
    negate_a: bool
    negate_b: bool
    transpose_a: bool
    transpose_b: bool

    @property
    def registers(self) -> int:
        """Accumulator registers of a thread."""
        return self.columns // (4 if self.form.c == "f16" else 2)


@dataclass(frozen=True)
class _Tiles:
    """A descriptor: start, LBO, SBO and the span of a row in bytes."""

    start: int
    leading: int
    stride: int
    span: int


def _decode(descriptor: int, extent: int, mn_major: bool, site: Site) -> _Tiles:
    """What a descriptor of a kind that was recorded says."""

    def refuse(reason: str) -> UnsupportedOpcode:
        return UnsupportedOpcode(site.opcode, site.ptx_line, f"descriptor {descriptor:#018x}: {reason}")

    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    span = _SPAN_BYTES[descriptor >> 62]
    if descriptor >> 49 & 7:
        raise refuse("a base offset is not known")
    if span == _CHUNK_BYTES:
        return _Tiles(start, leading, stride, span)
    pattern = 8 * span
    if start % pattern > (0 if mn_major else span - 2 * DEPTH):
        raise refuse(f"start {start:#x} is not at a {pattern}-byte swizzle pattern, plus k steps inside its first row")
    if stride % pattern or (mn_major and extent > span // 2 and leading % pattern):
        raise refuse(f"strides must keep the {pattern}-byte swizzle pattern")
    return _Tiles(start, leading, stride, span)


def _chunks(tiles: _Tiles, extent: int, mn_major: bool) -> Units:
    """Shared addresses of the 16-byte chunks of an operand: [extent, 2] K-major, [16, extent / 8] MN-major."""
    span, plain = tiles.span, tiles.span == _CHUNK_BYTES
    if mn_major:
        k = np.arange(DEPTH)[:, None]
        r = np.arange(0, extent, 8)
        by_row, by_k = (tiles.stride, tiles.leading) if plain else (tiles.leading, tiles.stride)
        linear = tiles.start + 2 * r // span * by_row + k // 8 * by_k + k % 8 * span + 2 * r % span
    else:
        r = np.arange(extent)[:, None]
        steps = np.arange(0, 2 * DEPTH, _CHUNK_BYTES) * (tiles.leading if plain else _CHUNK_BYTES) // _CHUNK_BYTES
        linear = tiles.start + r // 8 * tiles.stride + r % 8 * span + steps
    return np.asarray(linear ^ ((linear >> 7 & (span // _CHUNK_BYTES - 1)) << 4), np.int64)


class _Operands:
    """Reads the shared operands of one instruction for warps of one group of lanes."""

    def __init__(self, lanes: LaneSet, site: Site) -> None:
        self.lanes = lanes
        self.chunk = lanes.chunk
        self.site = site
        self.warps = lanes.warps
        """Numbers of the warps in the chunk."""

    def of_warps(self, descriptors: Array) -> list[int]:
        """The descriptor of each warp."""
        table = np.broadcast_to(descriptors, (self.lanes.count,)).reshape(-1, WARP)
        if (table != table[:, :1]).any():
            raise ValueError(f"{self.site.opcode} with descriptors that differ between the lanes of a warp")
        return [int(value) for value in table[:, 0]]

    def read(self, position: list[int], addresses: Units) -> Array:
        """16-byte chunks at shared addresses [chunks] for the warps at these positions: [warps, chunks * 8] uint16."""
        chunk, site = self.chunk, self.site
        warps = self.warps[position]
        owners = LaneSet(chunk, np.repeat(warps * WARP, addresses.size))
        base = np.tile(addresses, len(position))
        units = chunk.shared.units(owners, base, span_of(base), 0, _CHUNK_SHIFT, site)
        shared: SharedMemory = chunk.shared
        shared.check_initialised(owners, units, _CHUNK_SHIFT, site)
        races: ClockRaces = chunk.races
        agent = races.wgmma_agent(owners.index // WARP % races.warps)
        segment = chunk.wgmmas.committed.take(owners.index).astype(np.int64) + 1
        races.add_asynchronous(READ, units, _CHUNK_SHIFT, owners, site, agent, segment)
        rows: Array = shared.data.of[_CHUNK_SHIFT].take(units).view(np.uint16).reshape(len(position), -1)
        return rows

    def matrix_a(self, descriptors: Array, mn_major: bool) -> Array:
        """[warps, 16 rows, 16 k] uint16."""
        out = np.empty((self.warps.size, WARP_ROWS, DEPTH), np.uint16)
        for descriptor, quarter, position in self._alike(self.of_warps(descriptors), True):
            rows = WARP_ROWS * WARPS_PER_GROUP
            chunks = _chunks(_decode(descriptor, rows, mn_major, self.site), rows, mn_major)
            if mn_major:
                part = chunks[:, 2 * quarter : 2 * quarter + 2].reshape(-1)
                values = self.read(position, part).reshape(-1, DEPTH, WARP_ROWS)
                out[position] = values.transpose(0, 2, 1)
            else:
                part = chunks[WARP_ROWS * quarter : WARP_ROWS * (quarter + 1)].reshape(-1)
                out[position] = self.read(position, part).reshape(-1, WARP_ROWS, DEPTH)
        return out

    def matrix_b(self, descriptors: Array, columns: int, mn_major: bool) -> Array:
        """[warps, columns, 16 k] uint16."""
        out = np.empty((self.warps.size, columns, DEPTH), np.uint16)
        for descriptor, _, position in self._alike(self.of_warps(descriptors), False):
            tiles = _decode(descriptor, columns, mn_major, self.site)
            chunks = _chunks(tiles, columns, mn_major).reshape(-1)
            values = self.read(position, chunks)
            if mn_major:
                out[position] = values.reshape(-1, DEPTH, columns).transpose(0, 2, 1)
            else:
                out[position] = values.reshape(-1, columns, DEPTH)
        return out

    def _alike(self, descriptors: list[int], by_quarter: bool) -> list[tuple[int, int, list[int]]]:
        """(descriptor, number in the warpgroup, positions of the warps that share them)."""
        races: ClockRaces = self.chunk.races
        found: dict[tuple[int, int], list[int]] = {}
        for position, descriptor in enumerate(descriptors):
            quarter = int(self.warps[position]) % races.block_warps % WARPS_PER_GROUP if by_quarter else 0
            found.setdefault((descriptor, quarter), []).append(position)
        return [(descriptor, quarter, position) for (descriptor, quarter), position in found.items()]


def _check_whole(lanes: LaneSet, site: Site) -> None:
    if not lanes.frame.is_whole:
        bits = int(lanes.frame.present_bits[0])
        words = f"a warp executes the instruction with only the lanes {bits:#010x}; it needs all 32"
        lanes.chunk.run.collector.add("illegal_instruction", words, site, lanes, 0, lanes.count)


def _fragment_a(lanes: LaneSet, registers: tuple[Array, ...]) -> Array:
    """A registers -> [warps, 16 rows, 16 k] uint16."""
    warps = lanes.frame.rows
    out = np.empty((warps, WARP_ROWS, DEPTH), np.uint16)
    for number, register in enumerate(registers):
        rows, columns = 8 * (number % 2), 8 * (number // 2)
        table = np.ascontiguousarray(lanes.frame.spread(register)).view(np.uint16).reshape(warps, 8, 8)
        out[:, rows : rows + 8, columns : columns + 8] = table
    return out


def _to_matrix(table: U32, warps: int, columns: int, is_half: bool) -> Array:
    """Accumulator registers [registers, lanes] -> [warps, 16, columns]; of f16 (``is_half``) in uint16."""
    if is_half:
        pairs = table.view(np.uint16).reshape(columns // 8, 2, warps, 8, 4, 2)
        return np.ascontiguousarray(pairs.transpose(2, 1, 3, 0, 4, 5)).reshape(warps, WARP_ROWS, columns)
    parts = table.reshape(columns // 8, 2, 2, warps, 8, 4)
    return np.ascontiguousarray(parts.transpose(3, 1, 4, 0, 5, 2)).reshape(warps, WARP_ROWS, columns)


def _to_registers(matrix: Array, columns: int, is_half: bool) -> U32:
    """[warps, 16, columns] -> accumulator registers [registers, lanes]."""
    warps = len(matrix)
    parts = matrix.reshape(warps, 2, 8, columns // 8, 4, 2)
    if is_half:
        pairs = np.ascontiguousarray(parts.transpose(3, 1, 0, 2, 4, 5)).reshape(columns // 4, warps * WARP, 2)
        return pairs.view(np.uint32)[..., 0]
    return np.ascontiguousarray(parts.transpose(3, 1, 5, 0, 2, 4)).reshape(columns // 2, warps * WARP)


def _elements(rows: Array, kind: str, negates: bool) -> Array:
    """Rows of 32 bytes [..., 16] uint16 -> elements of a type, k ascending, in raw bits."""
    bits = ELEMENT_BITS[kind]
    if kind == "b1":
        return np.unpackbits(np.ascontiguousarray(rows).view(np.uint8), axis=-1, bitorder="little")
    dtype: Any = {8: np.uint8, 16: np.uint16, 32: np.uint32}[bits]
    found: Array = rows if bits == 16 else np.ascontiguousarray(rows).view(dtype)
    return found ^ dtype(1 << (bits - 1)) if negates else found


def _multiply(a: Array, b: Array, c: U32, warps: Units, form: Form) -> U32:
    """The products of all warps; four warps that share B are one tile of 64 rows."""
    whole = warps.size % WARPS_PER_GROUP == 0 and bool(
        (np.diff(warps.reshape(-1, WARPS_PER_GROUP)) == 1).all()
        and (warps[::WARPS_PER_GROUP] % WARPS_PER_GROUP == 0).all()
        and (b.reshape(-1, WARPS_PER_GROUP, *b.shape[1:]) == b[::WARPS_PER_GROUP, None]).all()
    )
    if not whole:
        return multiply(form, a, b, c)
    rows = WARPS_PER_GROUP * WARP_ROWS
    tiles = len(a) // WARPS_PER_GROUP
    d = multiply(form, a.reshape(tiles, rows, -1), b[::WARPS_PER_GROUP], c.reshape(tiles, rows, -1))
    return d.reshape(c.shape)


def multiply_async(site: Site, shape: Shape) -> Callable[..., tuple[U32, ...]]:
    """wgmma.mma_async: (lanes, scale-d predicate, B descriptor, A descriptor or four registers, accumulators...)."""
    a_operands = 4 if shape.a_in_registers else 1
    form, is_half = shape.form, shape.form.c == "f16"

    def run(lanes: LaneSet, adds: Flags, b_descriptor: Array, *registers: Array) -> tuple[U32, ...]:
        _check_whole(lanes, site)
        chunk = lanes.chunk
        operands = _Operands(lanes, site)
        if shape.a_in_registers:
            a = _fragment_a(lanes, registers[:4])
        else:
            a = operands.matrix_a(registers[0], shape.transpose_a)
        b = operands.matrix_b(b_descriptor, shape.columns, shape.transpose_b)
        a = _elements(a, form.a, shape.negate_a)
        b = _elements(b, form.b, shape.negate_b).transpose(0, 2, 1)
        table = np.zeros((shape.registers, lanes.count), np.uint32)
        if adds.any():
            for number, register in enumerate(registers[a_operands:]):
                table[number] = chunk.wgmmas.resolve(lanes, register, None)
            if not adds.all():
                table[:, ~np.broadcast_to(adds, (lanes.count,))] = 0
        c = _to_matrix(table, lanes.count // WARP, shape.columns, is_half)
        d = _multiply(a, b, c, operands.warps, form)
        return tuple(chunk.wgmmas.issue(lanes, _to_registers(d, shape.columns, is_half), site))

    return run


def require_finished(site: Site) -> Callable[..., None]:
    """(lanes, registers...) that an instruction is about to read: none of them may still be computed by a wgmma."""

    def run(lanes: LaneSet, *registers: Array) -> None:
        wgmmas: Wgmmas = lanes.chunk.wgmmas
        if not wgmmas.pending:
            return
        for register in registers:
            early = np.flatnonzero(wgmmas.resolve(lanes, register, None) != register)
            if early.size:
                words = "read of a register that a wgmma still computes: its group was not waited for"
                collector = lanes.chunk.run.collector
                collector.add("unfinished_product", words, site, lanes, int(early[0]), early.size)
                return

    return run


def fence_wgmma(site: Site) -> Callable[[LaneSet], None]:
    """wgmma.fence: (lanes); registers are in order here, so only the warps are checked."""

    def run(lanes: LaneSet) -> None:
        _check_whole(lanes, site)

    return run


def commit_wgmma() -> Callable[[LaneSet], None]:
    """wgmma.commit_group: (lanes)."""

    def run(lanes: LaneSet) -> None:
        lanes.chunk.wgmmas.commit(lanes)

    return run


def wait_wgmma(open_groups: int) -> Callable[..., Any]:
    """wgmma.wait_group: (lanes, registers that may hold placeholders...) -> those registers."""

    def run(lanes: LaneSet, *registers: Array) -> Any:
        results = lanes.chunk.wgmmas.wait(lanes, open_groups, registers)
        return results[0] if len(results) == 1 else results

    return run
