"""Names and parameter types out of a C++ symbol (``_Z3addPfi`` is ``add(float*, int)``): what PTX does not tell.

The part of the Itanium ABI that kernels use: names in namespaces, template instances, pointers, builtin types and
classes. A symbol with anything else in it gives None, and is taken as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass

_BUILTIN = {
    "v": "void", "b": "bool", "c": "char", "a": "signed char", "h": "unsigned char", "s": "short",
    "t": "unsigned short", "i": "int", "j": "unsigned int", "l": "long", "m": "unsigned long", "x": "long long",
    "y": "unsigned long long", "f": "float", "d": "double", "w": "wchar_t",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CxxType:
    """A type in words. ``pointee`` is what a pointer or reference points to; ``name`` is free of const and volatile."""

    name: str
    pointee: CxxType | None = None
    is_const: bool = False

    def __str__(self) -> str:
        return f"const {self.name}" if self.is_const else self.name


@dataclass(frozen=True, slots=True)
class Signature:
    """``name`` with namespaces and template arguments (``ns::scale<float>``), ``parameters`` in order."""

    name: str
    parameters: tuple[CxxType, ...]

    @property
    def bare_name(self) -> str:
        """The name without template arguments."""
        return self.name.partition("<")[0]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(str(parameter) for parameter in self.parameters)})"


def read_symbol(symbol: str) -> Signature | None:
    """The signature of a function's symbol; None for one of C, or one that is not understood."""
    if not symbol.startswith("_Z"):
        return None
    try:
        return _Reader(symbol[2:]).function()
    except (_NotUnderstood, IndexError, RecursionError):
        return None


def variable_name(symbol: str) -> str:
    """A variable's name with its namespaces; the symbol itself where it is one of C, or not understood."""
    if not symbol.startswith("_Z"):
        return symbol
    try:
        return _Reader(symbol[2:]).name()[0]
    except (_NotUnderstood, IndexError, RecursionError):
        return symbol


class _NotUnderstood(Exception):
    pass


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._seen: list[CxxType] = []
        self._arguments: list[CxxType] = []

    def function(self) -> Signature:
        name, is_template = self.name()
        parameters = []
        if is_template:
            self._type()  # instances of templates state what they return
        while self._at < len(self._text):
            parameters.append(self._type())
        return Signature(name, () if [each.name for each in parameters] == ["void"] else tuple(parameters))

    def name(self) -> tuple[str, bool]:
        """A name, and whether it ends in template arguments."""
        if self._take("N"):
            return self._nested()
        self._take("L")
        name = self._source_name()
        if self._peek() != "I":
            return name, False
        self._seen.append(CxxType(name))
        return name + self._template_arguments(), True

    def _nested(self) -> tuple[str, bool]:
        parts, is_template = "", False
        while not self._take("E"):
            if self._peek() == "I":
                parts += self._template_arguments()
                is_template = True
            elif self._peek() == "S":
                parts = self._substitution().name
                continue
            else:
                self._take("L")
                name = self._source_name()
                parts, is_template = f"{parts}::{name}" if parts else name, False
            if self._peek() != "E":
                self._seen.append(CxxType(parts))
        return parts, is_template

    def _template_arguments(self) -> str:
        self._expect("I")
        found: list[CxxType] = []
        self._read_arguments(found)
        self._arguments = found
        return f"<{', '.join(str(argument) for argument in found)}>"

    def _read_arguments(self, found: list[CxxType]) -> None:
        while not self._take("E"):
            if self._take("L"):
                found.append(self._literal())
            elif self._take("J"):
                self._read_arguments(found)
            else:
                found.append(self._type())

    def _literal(self) -> CxxType:
        kind = self._type().name
        end = self._text.index("E", self._at) if "E" in self._text[self._at :] else -1
        if end < 0:
            raise _NotUnderstood
        digits, self._at = self._text[self._at : end].replace("n", "-"), end + 1
        if not digits.lstrip("-").isdigit():
            raise _NotUnderstood
        return CxxType({"0": "false", "1": "true"}[digits] if kind == "bool" else digits)

    def _type(self) -> CxxType:
        head = self._peek()
        if head in _BUILTIN:
            self._at += 1
            return CxxType(_BUILTIN[head])
        if head == "S" and self._text[self._at + 1] != "t":
            return self._substitution()
        if self._take("K"):
            inner = self._type()
            return self._remember(CxxType(inner.name, inner.pointee, True))
        if self._take("V") or self._take("r"):
            return self._remember(self._type())
        if head in "PRO":
            self._at += 1
            inner = self._type()
            return self._remember(CxxType(f"{inner}{'*' if head == 'P' else '&'}", inner))
        if self._take("T"):
            return self._remember(self._arguments[self._number()])
        if self._take("N"):
            return self._remember(CxxType(self._nested()[0]))
        if head.isdigit():
            return self._class()
        raise _NotUnderstood

    def _class(self) -> CxxType:
        found = self._remember(CxxType(self._source_name()))
        if self._peek() != "I":
            return found
        kept = self._arguments
        found = CxxType(found.name + self._template_arguments())
        self._arguments = kept
        return self._remember(found)

    def _substitution(self) -> CxxType:
        self._expect("S")
        if not (self._peek() == "_" or self._peek().isdigit()):
            raise _NotUnderstood
        return self._seen[self._number()]

    def _number(self) -> int:
        """``_`` is 0, ``0_`` is 1, and so on, in base 36."""
        end = self._text.index("_", self._at) if "_" in self._text[self._at :] else -1
        digits, self._at = self._text[self._at : end], end + 1
        if end < 0 or (digits and not digits.isalnum()):
            raise _NotUnderstood
        return int(digits, 36) + 1 if digits else 0

    def _source_name(self) -> str:
        begin = self._at
        while self._peek().isdigit():
            self._at += 1
        if begin == self._at:
            raise _NotUnderstood
        length = int(self._text[begin : self._at])
        name = self._text[self._at : self._at + length]
        self._at += length
        if len(name) != length:
            raise _NotUnderstood
        return "(anonymous)" if name.startswith("_GLOBAL__N_") else name

    def _remember(self, found: CxxType) -> CxxType:
        self._seen.append(found)
        return found

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else "\0"

    def _take(self, letter: str) -> bool:
        if self._peek() != letter:
            return False
        self._at += 1
        return True

    def _expect(self, letter: str) -> None:
        if not self._take(letter):
            raise _NotUnderstood
