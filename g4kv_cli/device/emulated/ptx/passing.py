"""Arguments and results of a call: pieces of ``.param`` variables from registers to registers."""

from __future__ import annotations

from collections.abc import Iterable

from .instances import Instance, Piece, kind_of, overlap
from .instruction import Immediate, Register, Vector
from .link_output import LinkedBody

_MOVES = {"b16": "mov.b16", "b32": "mov.b32", "b64": "mov.b64"}


def pass_pieces(out: LinkedBody, pairs: Iterable[tuple[dict[Piece, Register], str, Instance, set[Piece]]]) -> None:
    """Copy pieces (source pieces, target variable, target instance, pieces wanted)."""
    for source, variable, instance, wanted in pairs:
        for piece in sorted(wanted):
            held = _part_of(out, source, piece) or _joined(out, source, piece)
            if held is None and any(overlap(piece, other) for other in source):
                out.refuse("an argument or result that is passed in pieces of unlike places")
                continue
            target = instance.piece(variable, piece)
            out.emit(_MOVES[target.kind], target, held if held is not None else Immediate(0))


def _part_of(out: LinkedBody, source: dict[Piece, Register], piece: Piece) -> Register | None:
    """A piece that was passed, alone or as part of a larger one."""
    begin, nbytes = piece
    if piece in source or nbytes == 8:
        return source.get(piece)
    first = begin - begin % (2 * nbytes)
    whole = _part_of(out, source, (first, 2 * nbytes))
    if whole is None:
        return None
    part = out.fresh(kind_of(nbytes))
    if nbytes == 1:
        out.emit("shr.u16", part, whole, Immediate(8 * (begin - first)))
        return part
    out.emit(f"mov.b{16 * nbytes}", Vector((part, None) if begin == first else (None, part)), whole)
    return part


def _joined(out: LinkedBody, source: dict[Piece, Register], piece: Piece) -> Register | None:
    """A piece that was passed in halves, or halves of these."""
    begin, nbytes = piece
    if piece in source or nbytes == 1:
        return source.get(piece)
    half = nbytes // 2
    low, high = _joined(out, source, (begin, half)), _joined(out, source, (begin + half, half))
    if low is None and high is None:
        return None
    whole = out.fresh(kind_of(nbytes))
    if nbytes > 2:
        zero = Immediate(0)
        out.emit(f"mov.b{8 * nbytes}", whole, Vector((low or zero, high or zero)))
        return whole
    parts = [out.fresh("b16"), out.fresh("b16")]
    out.emit("cvt.u16.u8", parts[0], low or Immediate(0))
    out.emit("shl.b16", parts[1], high or Immediate(0), Immediate(8))
    out.emit("or.b16", whole, *parts)
    return whole
