"""Which mma.sync of a block are joined, and what stays in order around them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from g4kv_cli.device.emulated.ptx.instruction import Instruction, Location, Register, Vector
from g4kv_cli.device.emulated.ptx.mma_batches import BATCH_LIMIT, WHOLE_WARP, batch_multiplies

OPCODES = {
    "mma": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "mma_k8": "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32",
    "mma_other": "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16",
    "wait": "wgmma.wait_group.sync.aligned",
}
LENGTHS = {"mma": (4, 4, 2, 4), "mma_k8": (4, 2, 1, 4), "mma_other": (2, 4, 2, 2)}

_registers: dict[str, Register] = {}


def _register(name: str) -> Register:
    return _registers.setdefault(name, Register(name, "b32"))


def _instruction(text: str, guard: str = "") -> Instruction:
    """``mma d a b c``, each a fragment of its registers (d.0, d.1, ...), or ``op target source...``."""
    kind, *names = text.split()
    opcode = OPCODES.get(kind, kind)
    held = _register(guard) if guard else None
    if kind in LENGTHS:
        fragments = zip(names, LENGTHS[kind], strict=True)
        vectors = tuple(Vector(tuple(_register(f"{name}.{at}") for at in range(count))) for name, count in fragments)
        return Instruction(opcode, vectors, held, False, 1, Location())
    return Instruction(opcode, tuple(_register(name) for name in names), held, False, 1, Location())


def _names(instruction: Instruction) -> str:
    """As _instruction takes it, joined fragments with + between them; ``check`` for the check of a warp."""
    if instruction.opcode == WHOLE_WARP:
        assert instruction.operands == ()
        return "check"
    words = ["mma" if ".sync.aligned.m16n8" in instruction.opcode else instruction.opcode]
    for operand in instruction.operands:
        items = operand.items if isinstance(operand, Vector) else (operand,)
        names = [item.name.split(".")[0] for item in items if isinstance(item, Register)]
        if isinstance(operand, Vector):
            # Registers of a fragment stand together, in their order.
            assert [item.name for item in items if isinstance(item, Register)] == [
                f"{name}.{names[:at].count(name) % 4}" for at, name in enumerate(names)
            ]
        words.append("+".join(dict.fromkeys(names)))
    return " ".join(words)


def _batched(*lines: str) -> list[str]:
    return [_names(item) for item in batch_multiplies([_instruction(line) for line in lines])]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # Two accumulators, the load of the next fragment in between: it goes first, the multiplies together.
        (["mma d0 a0 b0 d0", "ldmatrix b1.0 address", "mma d1 a1 b1 d1"],
         ["check", "ldmatrix b1 address", "check", "mma d0+d1 a0+a1 b0+b1 d0+d1"]),
        # A chain on one accumulator stays a chain.
        (["mma d0 a b0 d0", "mma d0 a b1 d0"], ["check", "mma d0 a b0 d0", "check", "mma d0 a b1 d0"]),
        # Who reads a result waits for it.
        (["mma d0 a b d0", "add x d0.2", "mma d1 a b d1"],
         ["check", "mma d0 a b d0", "add x d0", "check", "mma d1 a b d1"]),
        # Who overwrites an input waits until it was read.
        (["mma d0 a b d0", "ldmatrix b.1 address", "mma d1 a b d1"],
         ["check", "mma d0 a b d0", "ldmatrix b address", "check", "mma d1 a b d1"]),
        # Who overwrites a result that nobody read comes after it.
        (["mma d0 a b c", "mov d0.3 x"], ["check", "mma d0 a b c", "mov d0 x"]),
        # Another shape is another batch.
        (["mma d0 a b d0", "mma_k8 d1 e f d1"], ["check", "mma d0 a b d0", "check", "mma d1 e f d1"]),
        # What a wgmma has not finished, an mma before the wait reads unfinished.
        (["mma d0 a b d0", "wait", "mma d1 a b d1"],
         ["check", "mma d0 a b d0", "wgmma.wait_group.sync.aligned", "check", "mma d1 a b d1"]),
        # A kind that the device may not know stays as it is, to be told by its name.
        (["mma_other d0 a b d0", "mma_other d1 a b d1"], ["mma d0 a b d0", "mma d1 a b d1"]),
        # Nothing to join.
        (["add x y", "sub z x"], ["add x y", "sub z x"]),
    ],
)  # fmt: skip
def test_what_is_joined(lines: Sequence[str], expected: list[str]) -> None:
    assert _batched(*lines) == expected


def test_a_batch_has_an_end() -> None:
    lines = _batched(*(f"mma d{number} a{number} b{number} d{number}" for number in range(BATCH_LIMIT + 2)))
    joined = [line for line in lines if line != "check"]
    assert [len(line.split()[1].split("+")) for line in joined] == [BATCH_LIMIT, 2]
    assert lines.count("check") == BATCH_LIMIT + 2


def test_a_guarded_multiply_is_not_joined() -> None:
    body = [_instruction("mma d0 a b d0"), _instruction("mma d1 a b d1", guard="p"), _instruction("mma d2 e f d2")]
    names = [_names(item) for item in batch_multiplies(body)]
    assert names == ["check", "mma d1 a b d1", "check", "mma d0+d2 a+e b+f d0+d2"]
    assert [item for item in batch_multiplies(body) if item is body[1]]
