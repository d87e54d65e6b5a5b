"""Loaded code: its kernels and its variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.compiler.foreign import template_names
from g4kv_cli.device.emulated import EmulatorError, PtxSyntaxError
from g4kv_cli.device.emulated import Kernel as EmulatedKernel
from g4kv_cli.device.emulated import Module as EmulatedModule
from g4kv_cli.device.emulated.ptx.parse import Parameter, parse_parameters
from g4kv_cli.emulator.errors import KernelNotFound, SourceError, SymbolError, Unsupported
from g4kv_cli.emulator.mangled import Signature, read_symbol, variable_name
from g4kv_cli.emulator.memory import HostArray
from g4kv_cli.emulator.names import find_kernel, find_variable, kernel_words
from g4kv_cli.emulator.report import Report
from g4kv_cli.emulator.sources import LoadedSource

if TYPE_CHECKING:
    from g4kv_cli.emulator.device import Emulator


class Kernel:
    """A kernel of a module. ``name`` is as C++ writes it where that is known, ``symbol`` its name in the PTX."""

    def __init__(self, module: Module, symbol: str, handle: EmulatedKernel) -> None:
        self.module = module
        self.symbol = symbol
        self.name = kernel_words(symbol)
        self.handle = handle

    @property
    def signature(self) -> Signature | None:
        """The C++ parameter types; None for a kernel that is ``extern "C"``, or not of C++."""
        return read_symbol(self.symbol)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """What the PTX says of each parameter."""
        return self.handle.parameters

    def launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any] | Mapping[str, Any] = (),
        **options: Any,
    ) -> Report:
        """``Emulator.launch`` of this kernel."""
        return self.module.emulator.launch(self, grid, block, args, **options)

    def __repr__(self) -> str:
        return f"Kernel({self.name})"


class Module:
    """Code that ``Emulator.load`` loaded. ``log`` is what the compiler said of CUDA source."""

    def __init__(self, emulator: Emulator, loaded: LoadedSource) -> None:
        self.emulator = emulator
        self.name = loaded.name
        self.ptx = loaded.ptx
        self.log = loaded.log
        self._text = loaded.text
        self._expressions = loaded.symbols
        self._kernels: dict[str, Kernel] = {}
        self._parts = [_parsed(loaded.name, text) for text in loaded.ptx]
        if not self._symbols():
            raise SourceError(f"{loaded.name} has no kernel (.entry) in it")

    @property
    def kernel_names(self) -> list[str]:
        """All kernels, as C++ writes them where that is known."""
        return [kernel_words(symbol) for symbol in self._symbols()]

    @property
    def templates(self) -> list[str]:
        """Kernels of CUDA source that are templates: ``names`` makes instances of them."""
        return template_names(self._text)

    @property
    def variables(self) -> dict[str, int]:
        """All ``__device__`` and ``__constant__`` variables, as C++ writes them, with their bytes."""
        return {
            variable_name(symbol): part.parsed.variables[symbol].nbytes for symbol, part in self._variables().items()
        }

    def kernel(self, name: str | None = None) -> Kernel:
        """A kernel by its name (``add``, ``ns::add<float>``) or symbol; without one, the only one there is.

        Raises KernelNotFound, and Unsupported for a kernel that the emulated device cannot run.
        """
        symbol = self.symbol(name)
        if symbol not in self._kernels:
            try:
                handle = self._symbols()[symbol].kernel(symbol)
            except EmulatorError as error:
                raise Unsupported(
                    f"the emulated device cannot run {kernel_words(symbol)} of {self.name}: {error}"
                ) from error
            self._kernels[symbol] = Kernel(self, symbol, handle)
        return self._kernels[symbol]

    def symbol(self, name: str | None = None) -> str:
        """The symbol of a kernel, as ``kernel`` finds it. Raises KernelNotFound."""
        symbols = list(self._symbols())
        if name is not None:
            return find_kernel(name, symbols, self._expressions, self._text, self.name)
        if len(symbols) != 1:
            raise KernelNotFound(f"{self.name} has {len(symbols)} kernels: {', '.join(self.kernel_names)}; say which")
        return symbols[0]

    def parameters(self, symbol: str) -> tuple[Parameter, ...]:
        """What the PTX says of a kernel's parameters, also of one that the emulated device cannot run."""
        text, _, _, line = self._symbols()[symbol].parsed.bodies[symbol]
        try:
            return tuple(parse_parameters(text, line))
        except EmulatorError as error:
            raise Unsupported(f"parameters of {kernel_words(symbol)} in {self.name}: {error}") from error

    def ptx_of(self, symbol: str) -> str:
        """The PTX text that a kernel is in: a library has one for each translation unit."""
        return self.ptx[self._parts.index(self._symbols()[symbol])]

    def launch(
        self,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any] | Mapping[str, Any] = (),
        **options: Any,
    ) -> Report:
        """``Emulator.launch`` of the kernel of this name."""
        return self.emulator.launch(self.kernel(kernel), grid, block, args, **options)

    def get(self, name: str, dtype: npt.DTypeLike) -> HostArray:
        """A copy of a ``__device__`` or ``__constant__`` variable, as elements of ``dtype``, without axes if it is one.

        Raises SymbolError.
        """
        address, nbytes = self._place(name)
        kind = np.dtype(dtype)
        if not kind.itemsize or nbytes % kind.itemsize:
            raise SymbolError(f"{name} has {nbytes} bytes, which are no whole number of {kind}")
        values: HostArray = self.emulator.machine.read(address, nbytes).view(kind)
        return values.reshape(()) if values.size == 1 else values

    def set(self, name: str, values: Any) -> None:
        """Write all of a ``__device__`` or ``__constant__`` variable: a NumPy array or scalar, or bytes.

        Raises SymbolError if there is none of this name, or it has another number of bytes.
        """
        address, nbytes = self._place(name)
        if isinstance(values, (bool, int, float, str, list, tuple)) or values is None:
            raise SymbolError(f"{name} is set from a NumPy array or scalar, or bytes, not {type(values).__name__}")
        data = bytes(values) if isinstance(values, (bytes, bytearray)) else np.asarray(values).tobytes()
        if len(data) != nbytes:
            raise SymbolError(f"{name} has {nbytes} bytes, got {len(data)}")
        self.emulator.machine.write(address, data)

    def _symbols(self) -> dict[str, EmulatedModule]:
        found: dict[str, EmulatedModule] = {}
        for part in self._parts:  # newest architecture first, where a library has code for several
            for symbol in part.kernel_names:
                found.setdefault(symbol, part)
        return found

    def _variables(self) -> dict[str, EmulatedModule]:
        found: dict[str, EmulatedModule] = {}
        for part in self._parts:
            for name, variable in part.parsed.variables.items():
                if variable.space in ("global", "const"):
                    found.setdefault(name, part)
        return found

    def _place(self, name: str) -> tuple[int, int]:
        variables = self._variables()
        symbol = find_variable(name, list(variables), self.name)
        try:
            return self.emulator.machine.symbol(variables[symbol], symbol)
        except EmulatorError as error:
            raise SymbolError(f"{name} of {self.name}: {error}") from error

    def __repr__(self) -> str:
        return f"Module({self.name}: {', '.join(self.kernel_names)})"


def _parsed(name: str, text: str) -> EmulatedModule:
    try:
        return EmulatedModule(text)
    except PtxSyntaxError as error:
        raise SourceError(f"{name}: {error}") from error
    except EmulatorError as error:
        raise Unsupported(f"the emulated device cannot run {name}: {error}") from error
