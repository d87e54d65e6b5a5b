"""Kernel body text -> instructions: scopes, registers, labels, operands and source locations."""

from __future__ import annotations

import math
import re

from ..faults import PtxSyntaxError, UnsupportedOpcode
from .instruction import (
    Address,
    Call,
    Immediate,
    Instruction,
    Location,
    Negated,
    Operand,
    PredicatePair,
    Register,
    Symbol,
    TensorAddress,
    Vector,
)
from .modifiers import ordered
from .parse import REGISTER_KINDS, ParsedKernel, ParsedModule, Variable, parse_literal, parse_parameters, parse_variable

_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+(?:\s*,\s*function_name\s+[^,]+,\s*inlined_at\s+(\d+)\s+(\d+)\s+\d+)?")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_SPLIT = re.compile(r",(?![^{\[]*[}\]])")
_NESTED = re.compile(r"\[[^\]]*\{")
_INDEXED = re.compile(r"(.*?)(\d+)")
_CALL = re.compile(r"(?:\(([^)]*)\)\s*,\s*)?([%\w$]+)\s*(?:,\s*\(([^)]*)\)\s*)?(?:,\s*[\w$]+\s*)?")
_WIDE = "b128"
"""The kind of registers that exist while a body is read only."""
_IGNORED = frozenset({".pragma", ".loc", ".callprototype", ".calltargets"})


def _operand_texts(text: str) -> list[str]:
    """The operands of an instruction, cut at the commas outside of all braces and brackets."""
    if _NESTED.search(text) is None:
        return [part.strip() for part in _SPLIT.split(text) if part.strip()]
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


class _Scope:
    """Names declared between two braces; inner names hide outer ones."""

    def __init__(self, parent: _Scope | None, number: int) -> None:
        self.parent = parent
        self.suffix = f"#{number}" if number else ""
        self.registers: dict[str, Register] = {}
        self.families: dict[str, tuple[str, int]] = {}
        self.labels: set[str] = set()
        self.last_label = ""
        self.variables: dict[str, str] = {}

    def register(self, name: str) -> Register | None:
        scope: _Scope | None = self
        while scope is not None:
            found = scope.registers.get(name)
            if found is not None:
                return found
            match = _INDEXED.fullmatch(name) if scope.families else None
            family = scope.families.get(match.group(1)) if match else None
            if family is not None and match is not None and int(match.group(2)) < family[1]:
                found = scope.registers[name] = Register(name + scope.suffix, family[0])
                return found
            scope = scope.parent
        return None

    def label(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return name + scope.suffix
            scope = scope.parent
        return None

    def all_variables(self) -> set[str]:
        scope: _Scope | None = self
        found: set[str] = set()
        while scope is not None:
            found.update(scope.variables)
            scope = scope.parent
        return found

    def variable(self, name: str) -> str:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.variables:
                return scope.variables[name]
            scope = scope.parent
        return name


class _BodyParser:
    def __init__(self, module: ParsedModule, kernel: ParsedKernel, source_name: str | None) -> None:
        self.module = module
        self.kernel = kernel
        self.source_name = source_name
        self.own_parameters = "param::func" if kernel.name in module.functions else "param::entry"
        """The space of this body's parameters in full (PTX 8.3); that of the kernel in a function is another one."""
        self.scopes = 0
        self.scope = _Scope(None, 0)
        self.location = Location()
        self.pending_branches: list[tuple[int, _Scope]] = []
        self.pending_tables: list[tuple[str, _Scope, int]] = []
        self.operand_cache: dict[tuple[int, str], Operand | None] = {}
        self.halves: dict[Register, Vector] = {}
        """Of registers of 128 bits."""

    def run(self, text: str, first_line: int) -> None:
        statement: list[str] = []
        statement_line = first_line
        for line_number, line in enumerate(text.split("\n"), first_line):
            rest = line.strip()
            if not rest:
                continue
            if not statement and rest.startswith((".loc\t", ".loc ")):
                self._set_location(rest)
                continue
            while rest:
                if not statement:
                    statement_line = line_number
                    if rest[0] == "{":
                        self.scopes += 1
                        self.scope = _Scope(self.scope, self.scopes)
                        rest = rest[1:].lstrip()
                        continue
                    if rest[0] == "}":
                        if self.scope.parent is None:
                            raise PtxSyntaxError(f"unbalanced brace at PTX line {line_number}")
                        self.scope = self.scope.parent
                        rest = rest[1:].lstrip()
                        continue
                    match = _LABEL.match(rest)
                    if match is not None:
                        self._label(match.group(1))
                        rest = rest[match.end() :].lstrip()
                        continue
                end = rest.find(";")
                if end < 0:
                    statement.append(rest)
                    break
                statement.append(rest[:end])
                try:
                    self._statement(" ".join(statement).strip(), statement_line)
                except UnsupportedOpcode as error:
                    self.kernel.problems.append(located(error, self.location))
                statement.clear()
                rest = rest[end + 1 :].lstrip()
        if statement:
            raise PtxSyntaxError(f"statement at PTX line {statement_line} has no semicolon")
        self._resolve_branches()

    def _set_location(self, text: str) -> None:
        match = _LOC.match(text)
        if match is None:
            return
        number, line, call_number, call_line = match.groups()
        if int(line) == 0:
            return
        self.location = Location(
            self._file(int(number)),
            int(line),
            self._file(int(call_number)) if call_number else None,
            int(call_line) if call_line else 0,
        )

    def _file(self, number: int) -> str | None:
        """A file's bare name: its folder is one of the machine that compiled it."""
        name = self.module.files.get(number)
        if name is None:
            return self.source_name if number == 1 else None
        return name.replace("\\", "/").rpartition("/")[2]

    def _label(self, name: str) -> None:
        self.scope.labels.add(name)
        self.scope.last_label = name
        self.kernel.labels[name + self.scope.suffix] = len(self.kernel.instructions)

    def _statement(self, text: str, line: int) -> None:
        if not text:
            return
        if text[0] == ".":
            self._directive(text, line)
            return
        match = _INSTRUCTION.fullmatch(text)
        if match is None:
            raise PtxSyntaxError(f"cannot read '{text}' at PTX line {line}")
        negated, guard_name, opcode, operand_text = match.groups()
        opcode = ordered(opcode.replace(self.own_parameters, "param"))
        guard = None
        if guard_name:
            guard = self.scope.register(guard_name)
            if guard is None or guard.kind != "pred":
                raise PtxSyntaxError(f"guard {guard_name} is no predicate register, PTX line {line}")
            self.kernel.registers.add(guard)
        operands: tuple[Operand | None, ...]
        if opcode in ("bra", "bra.uni"):
            self.pending_branches.append((len(self.kernel.instructions), self.scope))
            operands = (Symbol(operand_text.strip()),)
        elif opcode in ("brx.idx", "brx.idx.uni"):
            index, table = (part.strip() for part in operand_text.split(","))
            operands = (self._operand(index, line), Symbol(self.scope.label(table) or table))
        elif opcode in ("call", "call.uni"):
            operands = (self._call(opcode, operand_text, line),)
        else:
            operands = tuple(self._operand(part, line) for part in _operand_texts(operand_text))
        if any(isinstance(operand, Register) and operand.kind == _WIDE for operand in operands):
            self._in_halves(opcode, operands, guard, negated == "!", line)
            return
        if opcode.startswith("mma."):
            kind = "b64" if ".f64." in opcode else "b32"
            operands = tuple(self._in_registers(operand, kind, line) for operand in operands)
        self.kernel.instructions.append(Instruction(opcode, operands, guard, negated == "!", line, self.location))

    def _in_halves(
        self, opcode: str, operands: tuple[Operand | None, ...], guard: Register | None, negated: bool, line: int
    ) -> None:
        """An instruction on registers of 128 bits, each of which is two of 64 here. Raises UnsupportedOpcode."""

        def add(name: str, *given: Operand | None) -> None:
            self.kernel.instructions.append(Instruction(name, given, guard, negated, line, self.location))

        halves = [self._halves(operand) if not isinstance(operand, Address) else operand for operand in operands]
        stem = opcode.split(".", 1)[0]
        pairs = [each.items for each in halves if isinstance(each, Vector) and len(each.items) == 2]
        if opcode == f"mov.{_WIDE}" and len(operands) == len(pairs) == 2:
            for to, of in zip(*pairs, strict=True):
                add("mov.b64", to, of)
        elif stem in ("ld", "st") and opcode.endswith(f".{_WIDE}"):
            add(f"{opcode.removesuffix(_WIDE)}v2.b64", *halves)
        elif stem == "atom" and opcode.endswith(f".{_WIDE}"):
            add(opcode, *halves)
        else:
            raise UnsupportedOpcode(opcode, line, "of registers of 128 bits only mov, ld, st and atom are known")

    def _halves(self, operand: Operand | None) -> Operand | None:
        """The two registers of 64 bits, lower first, of one of 128."""
        if operand is None:
            return Vector((None, None))
        if not isinstance(operand, Register) or operand.kind != _WIDE:
            return operand
        found = self.halves.get(operand)
        if found is None:
            pair = Register(f"{operand.name}.low", "b64"), Register(f"{operand.name}.high", "b64")
            found = self.halves[operand] = Vector(pair)
            self.kernel.registers.update(pair)
        self.kernel.registers.discard(operand)
        return found

    def _in_registers(self, operand: Operand | None, kind: str, line: int) -> Operand | None:
        """A vector of registers: a literal in it is moved into one of its own first, a sink (``_``) is one that nothing
        reads. What inline PTX may write where a compiler never does."""
        if not isinstance(operand, Vector) or all(isinstance(item, Register) for item in operand.items):
            return operand
        items = list(operand.items)
        for at, item in enumerate(items):
            if item is None or isinstance(item, Immediate):
                register = items[at] = Register(f"%own{len(self.kernel.registers)}", kind)
                self.kernel.registers.add(register)
                if item is not None:
                    move = f"mov.{kind}" if item.real is None else f"mov.f{kind[1:]}"
                    self.kernel.instructions.append(
                        Instruction(move, (register, item), None, False, line, self.location)
                    )
        return Vector(tuple(items))

    def _call(self, opcode: str, text: str, line: int) -> Call:
        match = _CALL.fullmatch(text)
        target = self._operand(match.group(2), line) if match is not None else None
        if match is None or not isinstance(target, Register | Symbol):
            raise UnsupportedOpcode(opcode, line, "operand form not understood")
        names = [[part.strip() for part in (group or "").split(",") if part.strip()] for group in match.group(1, 3)]
        for name in (*names[0], *names[1]):
            if self.scope.register(name) is not None or name not in self.scope.all_variables():
                raise UnsupportedOpcode(opcode, line, f"'{name}' is no .param variable")
        results, arguments = (tuple(self.scope.variable(name) for name in group) for group in names)
        return Call(results, target, arguments)

    def _directive(self, text: str, line: int) -> None:
        match = re.match(r"\.\w+", text)
        word = match.group() if match is not None else text
        if word == ".reg":
            self._declare_registers(text, line)
        elif word == ".param":
            (parameter,) = parse_parameters(text, line)
            self.scope.variables[parameter.name] = f"{parameter.name}#{self.scopes}"
        elif word == ".branchtargets":
            names = [name.strip() for name in text[len(word) :].split(",")]
            self.kernel.branch_tables[self.scope.last_label + self.scope.suffix] = names
            self.pending_tables.append((self.scope.last_label + self.scope.suffix, self.scope, line))
        elif word in (".shared", ".local", ".const", ".global"):
            variable = parse_variable(text, line)
            name = variable.name + self.scope.suffix
            self.scope.variables[variable.name] = name
            self.kernel.variables[name] = Variable(
                name, variable.space, variable.align, variable.nbytes, variable.external, variable.initial
            )
        elif word not in _IGNORED:
            raise UnsupportedOpcode(word, line, "directive inside a kernel")

    def _declare_registers(self, text: str, line: int) -> None:
        match = re.fullmatch(r"\.reg\s*\.(\w+)\s+(.*)", text, re.S)
        kind = _WIDE if match is not None and match.group(1) == _WIDE else None
        if match is None or (kind is None and match.group(1) not in REGISTER_KINDS):
            raise UnsupportedOpcode(text, line, "register declaration not understood")
        kind = kind or REGISTER_KINDS[match.group(1)]
        for name in match.group(2).split(","):
            family = re.fullmatch(r"([%\w$]+)<(\d+)>", name.strip())
            if family is not None:
                self.scope.families[family.group(1)] = (kind, int(family.group(2)))
            else:
                self.scope.registers[name.strip()] = Register(name.strip() + self.scope.suffix, kind)

    def _operand(self, text: str, line: int) -> Operand | None:
        key = (id(self.scope), text)
        if key in self.operand_cache:
            return self.operand_cache[key]
        operand = self._read_operand(text, line)
        if self.scope.parent is None:
            self.operand_cache[key] = operand
        return operand

    def _read_operand(self, text: str, line: int) -> Operand | None:
        if text == "_":
            return None
        register = self.scope.register(text)
        if register is not None:
            self.kernel.registers.add(register)
            return register
        literal = parse_literal(text)
        if literal is not None:
            return literal
        if text[0] == "{" and text[-1] == "}":
            return Vector(tuple(self._operand(part.strip(), line) for part in text[1:-1].split(",")))
        if text[0] == "[" and text[-1] == "]":
            inside = text[1:-1].strip()
            if inside.endswith("}") and "{" in inside:
                return self._read_tensor_address(inside, line)
            return self._read_address(inside, line)
        if text[0] == "!":
            inner = self._operand(text[1:].strip(), line)
            if isinstance(inner, Register):
                return Negated(inner)
        if "|" in text:
            first, second = (self._operand(part.strip(), line) for part in text.split("|", 1))
            if isinstance(first, Register | None) and isinstance(second, Register | None):
                return PredicatePair(first, second)
        if re.fullmatch(r"[%A-Za-z_$][\w$.]*", text):
            return Symbol(self.scope.variable(text))
        match = re.fullmatch(r"([A-Za-z_$][\w$]*)\s*\+\s*(-?\d+)", text)
        if match is not None:
            return Symbol(self.scope.variable(match.group(1)), int(match.group(2)))
        raise PtxSyntaxError(f"cannot read operand '{text}' at PTX line {line}")

    def _read_address(self, text: str, line: int) -> Address:
        match = re.fullmatch(r"([^+\s]+)\s*(?:\+\s*(-?\w+))?", text)
        if match is None:
            raise PtxSyntaxError(f"cannot read address '[{text}]' at PTX line {line}")
        base = self._operand(match.group(1), line)
        offset = int(match.group(2), 0) if match.group(2) else 0
        if isinstance(base, Register | Symbol):
            return Address(base, offset)
        literal = parse_literal(match.group(1))
        if literal is None:
            raise PtxSyntaxError(f"cannot read address '[{text}]' at PTX line {line}")
        return Address(None, literal.bits + offset)

    def _read_tensor_address(self, text: str, line: int) -> TensorAddress:
        base, _, rest = text.partition(",")
        coordinates = self._operand(rest.strip(), line)
        if not isinstance(coordinates, Vector):
            raise PtxSyntaxError(f"cannot read address '[{text}]' at PTX line {line}")
        return TensorAddress(self._read_address(base.strip(), line), coordinates)

    def _resolve_branches(self) -> None:
        tables = self.kernel.branch_tables
        for table, scope, line in self.pending_tables:
            labels = [scope.label(name) for name in tables[table]]
            if None in labels:
                raise PtxSyntaxError(f"branch to an unknown label at PTX line {line}")
            tables[table] = [label for label in labels if label is not None]
        for index, scope in self.pending_branches:
            instruction = self.kernel.instructions[index]
            target = instruction.operands[0]
            name = scope.label(target.name) if isinstance(target, Symbol) else None
            if name is None:
                raise PtxSyntaxError(f"branch to an unknown label at PTX line {instruction.ptx_line}")
            self.kernel.instructions[index] = Instruction(
                instruction.opcode,
                (Symbol(name),),
                instruction.guard,
                instruction.guard_negated,
                instruction.ptx_line,
                instruction.location,
            )


def located(error: UnsupportedOpcode, location: Location) -> UnsupportedOpcode:
    """The same with the source line of the instruction, where it is known."""
    if error.source_line is not None or not location.line:
        return error
    call_line = location.call_line or None
    return UnsupportedOpcode(error.opcode, error.ptx_line, error.reason, location.file, location.line, call_line)


def parse_kernel(module: ParsedModule, name: str, source_name: str | None = None) -> ParsedKernel:
    """Parse one kernel's body. ``source_name`` is that of the first source file, where the PTX names none."""
    if name not in module.bodies:
        known = ", ".join(sorted(module.bodies)) or "none"
        raise PtxSyntaxError(f"the module has no kernel '{name}'; it has {known}")
    parameter_text, directives, body, line = module.bodies[name]
    kernel = ParsedKernel(name, parse_parameters(parameter_text, line))
    for extents in re.findall(r"\.(?:maxntid|reqntid)\s+([\d, ]+)", directives):
        kernel.max_threads = math.prod(int(extent) for extent in extents.split(","))
    for extents in re.findall(r"\.reqnctapercluster\s+([\d, ]+)", directives):
        x, y, z = ([int(extent) for extent in extents.split(",")] + [1, 1])[:3]
        kernel.cluster = x, y, z
    kernel.grid_of_clusters = ".blocksareclusters" in directives
    _BodyParser(module, kernel, source_name).run(body, line)
    return kernel


def parse_function(module: ParsedModule, name: str, source_name: str | None = None) -> ParsedKernel:
    """Parse the body of a function that the module defines."""
    text = module.functions[name]
    function = ParsedKernel(name, parse_parameters(text.parameter_text, text.line))
    function.results = parse_parameters(text.result_text, text.line)
    _BodyParser(module, function, source_name).run(text.body or "", text.line)
    return function
