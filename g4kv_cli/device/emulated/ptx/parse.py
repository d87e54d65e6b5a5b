"""PTX text -> kernels as lists of instructions, for both dialects that NVRTC emits (typed registers; raw .b32/.b64)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..faults import PtxSyntaxError, UnsupportedOpcode
from .instruction import Immediate, Instruction, Register, Symbol

REGISTER_KINDS = {
    "pred": "pred",
    **dict.fromkeys(("b8", "u8", "s8", "b16", "u16", "s16", "f16"), "b16"),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2"), "b32"),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), "b64"),
}
"""Declared PTX type -> kind of the register's raw bits."""

TYPE_BYTES = {
    **dict.fromkeys(("b8", "u8", "s8"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 8),
    "b128": 16,
}


@dataclass(frozen=True)
class Variable:
    """A module or kernel variable. ``nbytes`` 0 with ``external`` is a dynamic shared array."""

    name: str
    space: str
    align: int
    nbytes: int
    external: bool = False
    initial: tuple[tuple[int, int | Symbol], ...] = ()
    element_bytes: int = 1


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter in the packed parameter block."""

    name: str
    offset: int
    nbytes: int
    align: int
    kind: str = "b8"
    """The PTX type of an element."""
    is_array: bool = False
    is_pointer: bool = False
    """Whether the PTX says ``.ptr``; NVRTC's does not, Triton's does."""


@dataclass
class ParsedKernel:
    """A kernel after parsing; ``labels`` maps a label to the index of the instruction after it."""

    name: str
    parameters: list[Parameter]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    registers: set[Register] = field(default_factory=set)
    max_threads: int = 0
    """From .maxntid or .reqntid; 0: no limit."""
    cluster: tuple[int, int, int] | None = None
    """From .reqnctapercluster: blocks of a cluster along x, y and z."""
    grid_of_clusters: bool = False
    """Whether .blocksareclusters makes a launch's grid count clusters."""
    contracts: bool = True
    """Whether products and sums are fused as ptxas fuses them."""
    contracted: int = 0
    """How many sums took a product in; known once the kernel is cut into blocks."""
    results: list[Parameter] = field(default_factory=list)
    """Of a function."""
    branch_tables: dict[str, list[str]] = field(default_factory=dict)
    """Labels that a brx.idx may go to, by the label of the list."""
    problems: list[UnsupportedOpcode] = field(default_factory=list)
    """What of the body was not understood; a kernel with problems cannot run."""


@dataclass(frozen=True)
class FunctionText:
    """A ``.func`` as text: ``body`` is None where it is defined elsewhere; ``line`` is the first of the body."""

    name: str
    result_text: str
    parameter_text: str
    body: str | None
    line: int


FUNCTION_WINDOW = 0x7B00_0000_0000
_FUNCTION_STEP = 16


@dataclass
class ParsedModule:
    """Module-level facts; bodies of kernels and functions stay text until asked for."""

    target: str
    version: str
    variables: dict[str, Variable]
    bodies: dict[str, tuple[str, str, str, int]]
    """Kernel name -> (parameter text, directives, body text, first body line)."""
    files: dict[int, str]
    functions: dict[str, FunctionText] = field(default_factory=dict)
    refused: dict[str, UnsupportedOpcode] = field(default_factory=dict)
    """Module variables that are not understood, by name; a kernel that names one of them is refused."""

    def function_address(self, name: str) -> int:
        """What a pointer to a function holds: an address in no state space."""
        return FUNCTION_WINDOW + _FUNCTION_STEP * (1 + list(self.functions).index(name))


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?([^{;]*)\{", re.S)
_FUNCTION = re.compile(
    r"\.func\b\s*(?:\.attribute\([^)]*\)\s*)?(?:\(([^)]*)\)\s*)?([\w$]+)\s*(?:\(([^)]*)\))?([^{;]*)([{;])", re.S
)
_ALIAS = re.compile(r"\.alias\s+([\w$]+)\s*,\s*([\w$]+)\s*;")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_PARAMETER = re.compile(
    r"^\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s*(\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?)?\s*([\w$]+)(?:\[(\d+)\])?$"
)
_VARIABLE = re.compile(
    r"^((?:\.(?:visible|extern|weak|common)\s+)*)\.(global|const|shared|local)\s+"
    r"(?:\.attribute\([^)]*\)\s+)?(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)((?:\[\d*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)


def _blank(match: re.Match[str]) -> str:
    return "\n" * match.group().count("\n")


def _body_end(text: str, start: int) -> int:
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    raise PtxSyntaxError("a kernel body has no closing brace; pass the complete PTX text")


def parse_module(text: str) -> ParsedModule:
    """Split PTX text into module variables and kernel bodies. Raises PtxSyntaxError, UnsupportedOpcode."""
    text = _COMMENT.sub(_blank, text)
    target = re.search(r"^\s*\.target\s+([\w, ]+)", text, re.M)
    version = re.search(r"^\s*\.version\s+([\d.]+)", text, re.M)
    if target is None or version is None:
        raise PtxSyntaxError("no .version or .target directive: this is not PTX text")
    files = {int(number): name for number, name in _FILE.findall(text)}
    module = ParsedModule(target.group(1).strip(), version.group(1), {}, {}, files)
    position = 0
    starts = sorted((*_ENTRY.finditer(text), *_FUNCTION.finditer(text)), key=lambda match: match.start())
    for match in starts:
        if match.start() < position:
            continue
        _read_variables(module, text, position, match.start())
        line = text.count("\n", 0, match.end()) + 1
        if match.re is _FUNCTION:
            result, name, parameters, _, last = match.groups()
            position = match.end()
            body = None
            if last == "{":
                end = _body_end(text, match.end())
                body, position = text[match.end() : end], end + 1
            if body is not None or name not in module.functions:
                module.functions[name] = FunctionText(name, result or "", parameters or "", body, line)
            continue
        end = _body_end(text, match.end())
        module.bodies[match.group(1)] = (match.group(2) or "", match.group(3), text[match.end() : end], line)
        position = end + 1
    _read_variables(module, text, position, len(text))
    return module


def _read_variables(module: ParsedModule, text: str, begin: int, end: int) -> None:
    """Module variables and aliases of functions between two bodies."""
    part = text[begin:end]
    section = part.find(".section")
    part = part if section < 0 else part[:section]
    for match in _ALIAS.finditer(part):
        if match.group(2) in module.functions:
            module.functions[match.group(1)] = module.functions[match.group(2)]
    line, counted = text.count("\n", 0, begin) + 1, 0
    for match in re.finditer(r"\.(?:global|const|shared)\b[^;]*;", part):
        first = max(part.rfind(";", counted, match.start()), part.rfind("\n", counted, match.start())) + 1
        line, counted = line + part.count("\n", counted, match.start()), match.start()
        statement = part[first : match.end() - 1].strip()
        try:
            variable = parse_variable(statement, line)
        except UnsupportedOpcode as error:
            name = re.search(r"([\w$]+)\s*(?:\[[^=]*)?(?:=|$)", statement)
            module.refused[name.group(1) if name is not None else statement] = error
            continue
        module.variables[variable.name] = variable


def parse_variable(statement: str, line: int) -> Variable:
    """One ``.global/.const/.shared/.local`` declaration without its semicolon."""
    match = _VARIABLE.match(statement)
    if match is None or match.group(4) not in TYPE_BYTES:
        raise UnsupportedOpcode(statement.split("\n")[0], line, "variable declaration not understood")
    linkage, space, align, kind, name, dimensions, initial = match.groups()
    element_bytes = TYPE_BYTES[kind]
    count = 1
    for size in re.findall(r"\[(\d*)\]", dimensions):
        count *= int(size or 0)
    items = _initial_items(initial, kind, line) if initial else ()
    if count == 0 and items:
        count = len(items)
    return Variable(
        name, space, int(align or element_bytes), count * element_bytes, ".extern" in linkage, items, element_bytes
    )


def _initial_items(text: str, kind: str, line: int) -> tuple[tuple[int, int | Symbol], ...]:
    """Initialiser list -> (element index, value bits or an address)."""
    items: list[tuple[int, int | Symbol]] = []
    for index, item in enumerate(part for part in re.split(r"[\s,{}]+", text) if part):
        place = re.fullmatch(r"(generic\()?([A-Za-z_$][\w$]*)(?(1)\))([+-]\d+)?", item)
        if place is not None:
            items.append((index, Symbol(place.group(2), int(place.group(3) or 0))))
            continue
        literal = parse_literal(item)
        if literal is None or literal.real is not None:
            raise UnsupportedOpcode(f".{kind} initialiser {item}", line)
        items.append((index, literal.bits & ((1 << (8 * TYPE_BYTES[kind])) - 1)))
    return tuple(items)


def parse_parameters(text: str, line: int) -> list[Parameter]:
    """Kernel parameter list -> offsets in the packed parameter block (each at its own alignment)."""
    parameters: list[Parameter] = []
    offset = 0
    for part in text.split(","):
        declaration = " ".join(part.split())
        if not declaration:
            continue
        match = _PARAMETER.match(declaration)
        if match is None or match.group(2) not in TYPE_BYTES:
            raise UnsupportedOpcode(declaration, line, "parameter declaration not understood")
        element_bytes = TYPE_BYTES[match.group(2)]
        align = int(match.group(1) or element_bytes)
        nbytes = element_bytes * int(match.group(5) or 1)
        offset = -(-offset // align) * align
        is_array, is_pointer = match.group(5) is not None, match.group(3) is not None
        parameters.append(Parameter(match.group(4), offset, nbytes, align, match.group(2), is_array, is_pointer))
        offset += nbytes
    return parameters


_INTEGER = re.compile(r"([+-]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?")
_REAL = re.compile(r"[+-]?\d+\.\d*(?:[eE][+-]?\d+)?|[+-]?\d+[eE][+-]?\d+")


def parse_literal(text: str) -> Immediate | None:
    """``12``, ``-0x1F``, ``0f3F800000``, ``0d...``, ``1.5`` -> Immediate; None when it is no literal."""
    match = _INTEGER.fullmatch(text)
    if match is not None:
        digits = match.group(2)
        octal = len(digits) > 1 and digits[0] == "0" and digits[1] not in "xXbB"
        value = int(digits, 8) if octal else int(digits, 0)
        return Immediate(-value if match.group(1) == "-" else value)
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
        return Immediate(int(text[2:], 16))
    if _REAL.fullmatch(text):
        return Immediate(0, float(text))
    return None
