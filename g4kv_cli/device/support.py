"""What the emulated device can run of an image: for each kernel, all that it does not support. Needs no device."""

from __future__ import annotations

from dataclasses import dataclass

from g4kv_cli.device.emulated import EmulatorError, Module, UnsupportedKernel, UnsupportedOpcode
from g4kv_cli.errors import CompileError


@dataclass(frozen=True, slots=True)
class Unsupported:
    """An instruction or a directive that is not emulated. ``source_line`` is None where the PTX has no line table;
    ``call_line`` is the line that inlined code was inlined into, if it was."""

    opcode: str
    reason: str
    ptx_line: int
    source_file: str | None
    source_line: int | None
    call_line: int | None


@dataclass(frozen=True, slots=True)
class KernelSupport:
    """One kernel; ``unsupported`` is empty if the emulated device can run it. ``interpreted_for`` says what the native
    engine does not know of it, for which the interpreter runs it, more slowly; ``called_for`` the opcodes for which the
    engine calls the interpreter's functions, and leaves large launches to it."""

    kernel: str
    unsupported: tuple[Unsupported, ...]
    interpreted_for: tuple[str, ...] = ()
    called_for: tuple[str, ...] = ()


def kernel_support(ptx: str, name: str) -> tuple[KernelSupport, ...]:
    """Every kernel of PTX text, in its order. Raises CompileError for text that is no PTX, or has no kernel."""
    try:
        module = Module(ptx, name)
        found = tuple(_support(module, kernel) for kernel in module.kernel_names)
    except EmulatorError as error:
        raise CompileError(f"{name}: {error}") from error
    if not found:
        raise CompileError(f"{name} has no kernel (no .entry in its PTX)")
    return found


def _support(module: Module, name: str) -> KernelSupport:
    try:
        kernel = module.kernel(name)
        return KernelSupport(name, (), kernel.not_native_for, kernel.called_for)
    except UnsupportedKernel as error:
        return KernelSupport(name, tuple(_as_record(problem) for problem in error.problems))
    except UnsupportedOpcode as error:
        return KernelSupport(name, (_as_record(error),))


def _as_record(problem: UnsupportedOpcode) -> Unsupported:
    return Unsupported(
        problem.opcode, problem.reason, problem.ptx_line, problem.source_file, problem.source_line, problem.call_line
    )
