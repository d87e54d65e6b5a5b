"""Which mma.sync of a block are joined, and what stays in order around them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from g4kv_cli.device.emulated.instruction import Instruction, Location, Register, Vector
from g4kv_cli.device.emulated.mma_batches import BATCH_LIMIT, batch_multiplies

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
MMA_K8 = "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32"

_registers: dict[str, Register] = {}


def _register(name: str) -> Register:
    return _registers.setdefault(name, Register(name, "b32"))


def _instruction(text: str, guard: str = "") -> Instruction:
    """``mma d a b c`` with one register for each fragment, or ``op target source...``."""
    opcode, *names = text.split()
    operands = [_register(name) for name in names]
    if opcode in ("mma", "mma_k8"):
        opcode = MMA if opcode == "mma" else MMA_K8
        vectors = tuple(Vector((register,)) for register in operands)
        return Instruction(opcode, vectors, _register(guard) if guard else None, False, 1, Location())
    return Instruction(opcode, tuple(operands), None, False, 1, Location())


def _names(instruction: Instruction) -> str:
    words = ["mma" if instruction.opcode.startswith("mma") else instruction.opcode]
    for operand in instruction.operands:
        items = operand.items if isinstance(operand, Vector) else (operand,)
        words.append("+".join(item.name for item in items if isinstance(item, Register)))
    return " ".join(words)


def _batched(*lines: str) -> list[str]:
    return [_names(item) for item in batch_multiplies([_instruction(line) for line in lines])]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # Two accumulators, the load of the next fragment in between: it goes first, the multiplies together.
        (
            ["mma d0 a b0 d0", "ldmatrix b1 address", "mma d1 a b1 d1"],
            ["ldmatrix b1 address", "mma d0+d1 a+a b0+b1 d0+d1"],
        ),
        # A chain on one accumulator stays a chain.
        (["mma d0 a b0 d0", "mma d0 a b1 d0"], ["mma d0 a b0 d0", "mma d0 a b1 d0"]),
        # Who reads a result waits for it.
        (["mma d0 a b d0", "add x d0", "mma d1 a b d1"], ["mma d0 a b d0", "add x d0", "mma d1 a b d1"]),
        # Who overwrites an input waits until it was read.
        (["mma d0 a b d0", "ldmatrix b address", "mma d1 a b d1"],
         ["mma d0 a b d0", "ldmatrix b address", "mma d1 a b d1"]),
        # Who overwrites a result that nobody read comes after it.
        (["mma d0 a b c", "mov d0 x"], ["mma d0 a b c", "mov d0 x"]),
        # Another shape is another batch.
        (["mma d0 a b d0", "mma_k8 d1 a b d1"], ["mma d0 a b d0", "mma d1 a b d1"]),
        # Nothing to join.
        (["add x y", "sub z x"], ["add x y", "sub z x"]),
    ],
)  # fmt: skip
def test_what_is_joined(lines: Sequence[str], expected: list[str]) -> None:
    assert _batched(*lines) == expected


def test_a_batch_has_an_end() -> None:
    joined = _batched(*(f"mma d{number} a b d{number}" for number in range(BATCH_LIMIT + 2)))
    assert [len(line.split()[1].split("+")) for line in joined] == [BATCH_LIMIT, 2]


def test_a_guarded_multiply_is_not_joined() -> None:
    body = [_instruction("mma d0 a b d0"), _instruction("mma d1 a b d1", guard="p"), _instruction("mma d2 a b d2")]
    guarded, joined = batch_multiplies(body)
    assert guarded is body[1]
    assert _names(joined) == "mma d0+d2 a+a b+b d0+d2"
