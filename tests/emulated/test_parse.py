"""The PTX parser on text written by hand: operands, scopes, source lines, and everything it must refuse."""

from __future__ import annotations

import pytest

from g4kv_cli.device.emulated import Module, PtxSyntaxError, UnsupportedOpcode
from g4kv_cli.device.emulated.ptx.flow import build_flow
from g4kv_cli.device.emulated.ptx.instruction import (
    Address,
    Immediate,
    Negated,
    PredicatePair,
    Register,
    Symbol,
    Vector,
)
from g4kv_cli.device.emulated.ptx.parse import parse_literal, parse_module, parse_parameters, parse_variable
from g4kv_cli.device.emulated.ptx.parse_body import parse_kernel

HEADER = '.version 8.5\n.target sm_90\n.address_size 64\n.file 1 "here.cu"\n'


def text_of(body: str, parameters: str = "", before: str = "") -> str:
    return f"{HEADER}{before}.visible .entry kernel({parameters})\n{{\n{body}\n}}\n"


def instructions(body: str):
    return parse_kernel(parse_module(text_of(body)), "kernel").instructions


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("12", 12),
        ("-12", -12),
        ("0x1F", 31),
        ("-0x10", -16),
        ("010", 8),
        ("0b101", 5),
        ("7U", 7),
        ("0f3F800000", 0x3F800000),
        ("0FBF800000", 0xBF800000),
        ("0d4000000000000000", 0x4000000000000000),
    ],
)
def test_literals(text: str, bits: int) -> None:
    assert parse_literal(text) == Immediate(bits)


def test_decimal_floats_and_names_are_told_apart() -> None:
    assert parse_literal("-1.5e3") == Immediate(0, -1500.0)
    for text in ("x", "%r1", "0f3F8000", "1.2.3", "_"):
        assert parse_literal(text) is None


def test_operand_forms() -> None:
    body = """
      .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .f32 %f<2>;
      shfl.sync.bfly.b32 %r1|%p1, %r2, 16, 31, -1;
      ld.global.v4.u32 {%r1, %r2, _, %r4}, [%rd1+-16];
      st.shared.f32 [table+8], 0f00000000;
      selp.b32 %r5, %r6, -7, %p2;
      and.pred %p1, %p2, !%p1;
      mov.u32 %r7, %tid.x;
      mov.u64 %rd2, table+4;
    """
    shuffle, load, store, choose, both, special, symbol = instructions(body)
    pair = shuffle.operands[0]
    assert isinstance(pair, PredicatePair)
    assert (pair.first.name, pair.second.name, pair.second.kind) == ("%r1", "%p1", "pred")
    assert shuffle.operands[4] == Immediate(-1)
    vector, address = load.operands
    assert isinstance(vector, Vector)
    assert [item.name if item else None for item in vector.items] == ["%r1", "%r2", None, "%r4"]
    assert isinstance(address, Address)
    assert (address.base.name, address.base.kind, address.offset) == ("%rd1", "b64", -16)
    assert store.operands == (Address(Symbol("table"), 8), Immediate(0))
    assert isinstance(choose.operands[1], Register)
    assert choose.operands[1] is not choose.operands[0]
    negated = both.operands[2]
    assert isinstance(negated, Negated)
    assert negated.register is both.operands[0]
    assert special.operands[1] == Symbol("%tid.x")
    assert symbol.operands[1] == Symbol("table", 4)


def test_reads_and_writes() -> None:
    body = """
      .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<4>;
      @!%p1 ld.global.v2.u32 {%r1, %r2}, [%rd1];
      st.global.u32 [%rd2], %r3;
      add.cc.u32 %r4, %r5, %r6;
      addc.u32 %r7, %r5, %r6;
    """
    load, store, add, carry = instructions(body)
    names = [[register.name for register in registers] for registers in (load.reads, load.writes)]
    assert names == [["%rd1", "%p1", "%r1", "%r2"], ["%r1", "%r2"]]  # under a guard the old values are read too
    assert load.guard_negated
    assert [register.name for register in store.reads] == ["%rd2", "%r3"]
    assert store.writes == []
    assert [register.name for register in add.writes] == ["%r4", "%carry"]
    assert [register.name for register in carry.reads] == ["%r5", "%r6", "%carry"]


def test_inner_names_hide_outer_ones() -> None:
    body = """
      .reg .b32 %r<2>; .reg .b32 t;
      mov.u32 t, 1; { .reg .b32 t; mov.u32 t, 2; { mov.u32 %r1, t; } } mov.u32 %r0, t;
    """
    outer, inner, innermost, last = instructions(body)
    assert outer.operands[0] is last.operands[1]
    assert inner.operands[0] is innermost.operands[1]
    assert inner.operands[0] is not outer.operands[0]


def test_source_lines() -> None:
    body = """
      .reg .b32 %r<5>;
      .loc 1 10 3
      mov.u32 %r1, 1;
      .loc 1 0 3
      mov.u32 %r2, 1;
      .loc 1 20 5, function_name $L__info_string0, inlined_at 1 12 7
      mov.u32 %r3,
         2;
      mov.u32 %r4, 3; mov.u32 %r1, 4;
    """
    first, second, third, fourth, fifth = instructions(body)
    assert (first.location.file, first.location.line, first.location.call_line) == ("here.cu", 10, 0)
    assert second.location.line == 10  # line 0 names no line
    assert (third.location.line, third.location.call_line, third.location.call_file) == (20, 12, "here.cu")
    assert [item.ptx_line - first.ptx_line for item in (third, fourth, fifth)] == [4, 6, 6]
    assert text_of(body).split("\n")[first.ptx_line - 1].strip() == "mov.u32 %r1, 1;"


def test_parameters_lie_as_in_a_struct() -> None:
    text = ".param .u8 a, .param .u64 .ptr .align 1 b, .param .align 16 .b8 c[20], .param .f32 d"
    assert [(p.name, p.offset, p.nbytes) for p in parse_parameters(text, 1)] == [
        ("a", 0, 1),
        ("b", 8, 8),
        ("c", 16, 20),
        ("d", 36, 4),
    ]


def test_variables() -> None:
    one = parse_variable(".const .align 4 .b8 table[16] = {1, 0, 255, 0x10}", 1)
    assert (one.name, one.space, one.align, one.nbytes) == ("table", "const", 4, 16)
    assert one.initial == ((0, 1), (1, 0), (2, 255), (3, 16))
    two = parse_variable(".visible .global .align 8 .u64 where[2] = {table, 5}", 1)
    assert (two.nbytes, two.initial) == (16, ((0, Symbol("table")), (1, 5)))
    shared = parse_variable(".extern .shared .align 128 .b8 smem[]", 1)
    assert (shared.external, shared.nbytes, shared.align) == (True, 0, 128)
    assert parse_variable(".shared .f32 pair[2][3]", 1).nbytes == 24


REGISTERS = ".reg .pred %p<3>; .reg .b16 %rs<3>; .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .f32 %f<5>;\n"


@pytest.mark.parametrize(
    "statement",
    [
        "fma.rn.f33 %f1, %f1, %f1, %f1;",
        "add.ftz.sat.rz.f32 %f1, %f1, %f1;",
        "ld.global.nc.L1::evict_most.u32 %r1, [%rd1];",
        "ld.global.u32.v2 {%r1, %r2}, [%rd1];",
        "ld.shared::gpu.u32 %r1, [%r2];",
        "st.global.nc.u32 [%rd1], %r1;",
        "atom.global.add.bf16x2 %r1, [%rd1], %r2;",
        "red.shared.add.v2.f32 [%r1], {%f1, %f2};",
        "shfl.bfly.b32 %r1, %r2, 1, 31;",
        "mma.sync.aligned.m8n8k16.row.row.s32.s8.s8.s32 {%r1, %r1}, {%r1}, {%r1}, {%r1, %r1};",
        "ldmatrix.sync.aligned.m8n8.x3.shared.b16 {%r1, %r2, %r3}, [%r4];",
        "cp.async.bulk.shared::cta.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r3], 16, [%r2];",
        "cp.async.cg.shared.global [%r1], [%rd1], 8;",
        "mbarrier.init.shared::cluster.b64 [%r1], 1;",
        "mov.u32 %r1, %envreg5;",
        "mov.b128 %rd1, {%rd1, %rd2};",
        "add.s32 %r1, %r2;",
        "add.s32 %r1, %r2, %r3, %r4;",
        "add.s32 %p1, %r2, %r3;",
        "setp.lt.s32 %r1, %r2, %r3;",
        "discard.global.L2 [%rd1], 128;",
        "bar.sync 0, 32, 5;",
        "getctarank.u32 %r1, %r2;",
        "mov.u32 %r1, nowhere;",
        "call.uni (%r1), function, (%r2);",
    ],
)
def test_what_is_not_known_completely_is_refused(statement: str) -> None:
    text = text_of(REGISTERS + statement + "\nret;")
    with pytest.raises(UnsupportedOpcode) as caught:
        Module(text).kernel("kernel")
    assert caught.value.opcode == statement.split()[0].rstrip(";")
    assert text.split("\n")[caught.value.ptx_line - 1].strip() == statement
    assert caught.value.opcode in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [".reg .b256 %q<2>;", ".reg .v4 .f32 %q<2>;", ".param .b32 %q;"],
)
def test_directives_that_are_not_known_are_refused(body: str) -> None:
    with pytest.raises(UnsupportedOpcode):
        Module(text_of(body + "\nret;")).kernel("kernel")


def test_a_function_that_nobody_calls_and_one_that_is_not_there() -> None:
    function = ".func (.param .b32 r) f(.param .b32 a)\n{\ngetctarank.u32;\nret;\n}\n.extern .func g;\n"
    assert Module(text_of("ret;", before=function)).kernel("kernel").instruction_count == 1
    with pytest.raises(UnsupportedOpcode, match=r"'call g'.*not defined in this module"):
        Module(text_of("call g;\nret;", before=function)).kernel("kernel")
    with pytest.raises(UnsupportedOpcode, match="f has 1 parameters and 1 results"):
        Module(text_of("call f;\nret;", before=function)).kernel("kernel")
    call = "{.param .b32 p, q;\nst.param.b32 [p], 1;\ncall (q), f, (p);}\nret;"
    with pytest.raises(UnsupportedOpcode, match="getctarank"):
        Module(text_of(call.replace("p, q", "p;.param .b32 q"), before=function)).kernel("kernel")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int main() {}", "not PTX"),
        (HEADER + ".visible .entry kernel()\n{ ret;", "closing brace"),
        (text_of("bra $nowhere;"), "unknown label"),
        (text_of("$t: .branchtargets $nowhere;"), "unknown label"),
        (text_of("ret"), "no semicolon"),
        (text_of("@%p1 ret;"), "no predicate register"),
        (text_of(".reg .b32 %r<3>; add.s32 %r1, %r2, %r3;").replace("%r3;", "%r3 %r1;"), "cannot read operand"),
    ],
)
def test_broken_text(text: str, words: str) -> None:
    with pytest.raises(PtxSyntaxError, match=words):
        Module(text).kernel("kernel")


def test_an_unknown_kernel_name() -> None:
    with pytest.raises(PtxSyntaxError, match="no kernel 'other'; it has kernel"):
        Module(text_of("ret;")).kernel("other")


def test_a_module_knows_its_kernels_and_keeps_them() -> None:
    module = Module(text_of("ret;"))
    assert module.kernel_names == ["kernel"]
    assert module.kernel("kernel") is module.kernel("kernel")


def test_what_follows_a_loop_is_scheduled_after_all_of_it() -> None:
    """Lanes that leave a loop early must wait for the others at its end, wherever the text places the blocks."""
    body = """
      .reg .pred %p<4>; .reg .b32 %r<3>;
      mov.u32 %r1, 0;
      bra $head;
      $after: mov.u32 %r2, 7;
      ret;
      $bad: trap;
      $head: add.s32 %r1, %r1, 1;
      setp.gt.s32 %p1, %r1, 5;
      @%p1 bra $after;
      setp.gt.s32 %p2, %r1, 9;
      @%p2 bra $bad;
      setp.gt.s32 %p3, %r1, 3;
      @%p3 bra $head;
      add.s32 %r1, %r1, 1;
      bra $head;
    """
    flow = build_flow(parse_kernel(parse_module(text_of(body)), "kernel"))
    after = next(n for n, block in enumerate(flow.blocks) if block.end == "exit")
    in_loop = [n for n, block in enumerate(flow.blocks) if block.end in ("branch", "jump") and n != flow.entry]
    assert len(in_loop) == 5  # with the one that both ways back to the head lead to, behind all others
    assert [n for n in in_loop if not flow.blocks[n].size] == [max(in_loop)]
    assert after > max(in_loop)
    assert flow.blocks[0].end == "trap"  # a trap comes before everything else
