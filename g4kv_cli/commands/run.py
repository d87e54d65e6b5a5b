"""``g4kv run``: one launch of any CUDA kernel, with no Python to write."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from g4kv_cli import emulator
from g4kv_cli.commands.run_arguments import FORMS, RunArgument, parse_arguments
from g4kv_cli.commands.run_device import launch_on
from g4kv_cli.compiler.foreign import NoKernel, compile_foreign
from g4kv_cli.compiler.toolkit import nvrtc_version
from g4kv_cli.device.interface import Device
from g4kv_cli.device.open import open_device
from g4kv_cli.emulator.arguments import parameter_words
from g4kv_cli.emulator.device import DEFAULT_SECONDS
from g4kv_cli.emulator.mangled import read_symbol
from g4kv_cli.emulator.names import kernel_words
from g4kv_cli.emulator.policy import Policy
from g4kv_cli.errors import EXIT_FINDINGS, DeviceFault, G4kvError, UsageError
from g4kv_cli.records.files import require_place, write_whole
from g4kv_cli.report.output import outlive_reader
from g4kv_cli.report.run import ArrayOutcome, RunRecord, print_outcome, print_start, write_record
from g4kv_cli.report.terminal import print_line, results_console

_COMPILED = (".ptx", ".fatbin", ".o", ".so")
Extent = tuple[int, int, int]


@dataclass(frozen=True)
class Request:
    """The command's options, as click gives them."""

    file: Path
    kernel: str | None
    grid: Extent | None
    block: Extent | None
    args: tuple[str, ...]
    cluster: Extent | None
    shared: int
    symbols: tuple[str, ...]
    saves: tuple[str, ...]
    seed: int
    device: str
    options: tuple[str, ...]
    include: tuple[Path, ...]
    ignore: tuple[str, ...]
    seconds: float
    lists: bool
    json_path: Path | None

    @property
    def is_source(self) -> bool:
        """Whether the file has to be compiled."""
        return self.file.suffix not in _COMPILED

    @property
    def expressions(self) -> list[str]:
        """The kernel as a name expression, where it is an instance of a template."""
        is_instance = self.is_source and self.kernel is not None and "<" in self.kernel
        return [str(self.kernel).partition("(")[0]] if is_instance else []


def _extent(context: click.Context, parameter: click.Parameter, value: str | None) -> Extent | None:
    if value is None:
        return None
    parts = value.replace("x", ",").split(",")
    if not 1 <= len(parts) <= 3 or not all(part.strip().isdigit() for part in parts):
        raise click.BadParameter(f"{value!r} is no extent; write 4, 4,2 or 4,2,1", context, parameter)
    x, y, z = (*(int(part) for part in parts), 1, 1)[:3]
    return x, y, z


@click.command(epilog=f"SPEC: {FORMS}. random: floats of the standard normal distribution, integers from 0 to 99; "
               "out: the kernel has to store every element; @file.npy of two-byte voids is bf16.")  # fmt: skip
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--kernel", metavar="NAME", help="As C++ writes it, scale<float> too. Without it, the only one there is.")
@click.option("--grid", callback=_extent, metavar="X[,Y[,Z]]", help="Blocks of the grid.")
@click.option("--block", callback=_extent, metavar="X[,Y[,Z]]", help="Threads of a block.")
@click.option("--arg", "args", multiple=True, metavar="[NAME=]SPEC", help="The next argument; see SPEC below.")
@click.option("--cluster", callback=_extent, metavar="X[,Y[,Z]]", help="Blocks of a thread block cluster.")
@click.option("--shared", type=click.IntRange(0), default=0, metavar="BYTES", help="Dynamic shared memory of a block.")
@click.option(
    "--symbol", "symbols", multiple=True, metavar="NAME=SPEC", help="Set a __device__ or __constant__ variable."
)
@click.option(
    "--save", "saves", multiple=True, metavar="NAME=FILE.npy", help="Write an array argument after the launch."
)
@click.option("--seed", type=click.IntRange(0, 2**32), default=1, show_default=True, help="Seed of random data.")
@click.option(
    "--device",
    default="emulated",
    show_default=True,
    metavar="emulated[:ARCH]|cuda[:N]|auto",
    envvar="G4KV_DEVICE",
    show_envvar=True,
    help="Where it runs; a GPU checks nothing but wild addresses.",
)
@click.option("--option", "options", multiple=True, metavar="OPTION", help="For NVRTC, such as --option=--fmad=false.")
@click.option(
    "--include", multiple=True, type=click.Path(path_type=Path), metavar="DIR", help="Where your headers lie."
)
@click.option("--ignore", multiple=True, metavar="KIND", help="Do not report findings of this kind.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=DEFAULT_SECONDS, show_default=True,
              help="Give the launch up after this time.")  # fmt: skip
@click.option("--list", "lists", is_flag=True, help="Show the file's kernels, parameters and variables; run nothing.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Also write a record as JSON.")  # fmt: skip
def run(**options: Any) -> int:
    """Launch a kernel of FILE (.cu, .ptx, .fatbin, .o, .so) once and show what it stored and what was found.

    \b
    g4kv run scale.cu --kernel 'scale<float>' --grid 4 --block 256 \\
        --arg x=f32[1024]:random --arg f32:2.5 --arg i32:1024 --save x=scaled.npy

    Exit codes: 0 nothing was found; 1 the kernel broke a rule; 2 the request or the compiler failed, or the launch
    had not ended in time.
    """
    request = Request(**options)
    outlive_reader(request.json_path)
    policy = Policy({"default": "report", **dict.fromkeys(request.ignore, "ignore")})
    device = open_device(request.device)
    try:
        try:
            module = _load(request, device)
        except NoKernel as error:
            if request.lists and error.templates:
                _print_templates(error.templates)
                return 0
            raise
        if request.lists:
            _print_kernels(module)
            return 0
        return _run(request, module, device, policy)
    finally:
        device.close()


def _load(request: Request, device: Device) -> emulator.Module:
    if not request.is_source and request.device.startswith("emulated:"):
        raise UsageError(f"{request.file} is compiled already, for a target of its own; write --device emulated")
    return emulator.load(
        request.file,
        arch=device.info.arch if request.is_source else None,
        options=request.options,
        include=request.include,
        names=request.expressions,
        seconds=request.seconds,
    )


def _run(request: Request, module: emulator.Module, device: Device, policy: Policy) -> int:
    """Launch, show and write down what came of it; the exit code."""
    if request.grid is None or request.block is None:
        raise UsageError("a launch needs --grid and --block; --list shows the kernels of the file")
    if request.symbols and device.info.kind != "emulated":
        raise UsageError("--symbol works on the emulated device only; write --device emulated")
    symbol, extents = module.symbol(request.kernel), (request.grid, request.block)
    arguments = parse_arguments("--arg", request.args, request.seed)
    variables = parse_arguments("--symbol", request.symbols, request.seed)
    targets = _targets(request.saves, arguments)
    record = RunRecord(
        source=str(request.file),
        kernel=kernel_words(symbol),
        device=device.info,
        nvrtc=nvrtc_version() if request.is_source else "",
        grid=request.grid,
        block=request.block,
        cluster=request.cluster or (1, 1, 1),
        shared_bytes=request.shared,
        seed=request.seed,
        arguments=tuple((argument.name, argument.spec) for argument in arguments),
        options=request.options,
    )
    _write(request, record, "still running, or killed")
    print_start(record)
    values = {argument.name: argument.value for argument in arguments}
    before = {argument.name: _digest(argument.array) for argument in arguments if argument.array is not None}
    report, findings, begin = None, [], time.perf_counter()
    try:
        if device.info.kind == "emulated":
            for variable in variables:
                module.set(variable.name, variable.value)
            kernel = module.kernel(request.kernel)
            report = kernel.launch(*extents, values, shared=request.shared, policy=policy, cluster=request.cluster or 1)
            findings = [str(found["text"]) for found in report.to_json()["findings"]]
        else:
            findings = _run_on_gpu(request, module, symbol, device, extents, values)
    except G4kvError as error:
        _write(request, record, str(error))
        raise
    seconds = time.perf_counter() - begin
    arrays = [
        ArrayOutcome(each.name, each.spec, each.array, _is_stored(each, report, before))
        for each in arguments
        if each.array is not None
    ]
    print_outcome(report, arrays, findings, seconds)
    for path, array in targets:
        content = io.BytesIO()
        np.save(content, array)
        write_whole(path, content.getvalue(), "--save")
    _write(request, record, "finished", report, arrays, findings)
    return EXIT_FINDINGS if findings else 0


def _run_on_gpu(
    request: Request,
    module: emulator.Module,
    symbol: str,
    device: Device,
    extents: tuple[Extent, Extent],
    values: dict[str, Any],
) -> list[str]:
    """Launch on a GPU; the faults that its driver reports."""
    image = module.ptx_of(symbol).encode()
    if request.is_source and device.image_kind == "cubin":
        text = request.file.read_text(encoding="utf-8")
        image = compile_foreign(
            request.file.name, text, arch=device.info.arch, kind="cubin", options=request.options,
            include=[request.file.resolve().parent, *request.include], expressions=request.expressions,
        ).data  # fmt: skip
    device.limit_time(request.seconds)
    try:
        launch_on(device, module, symbol, image, extents, values, request.shared, request.cluster or (1, 1, 1))
    except DeviceFault as fault:
        return list(fault.reports)
    return []


def _is_stored(argument: RunArgument, report: emulator.Report | None, before: dict[str, str]) -> bool:
    """Whether the kernel stored to an array: as the emulated device saw it, else by what it holds."""
    if report is not None and argument.name in report.stored:
        return report.stored[argument.name] > 0
    return argument.array is not None and _digest(argument.array) != before[argument.name]


def _targets(saves: tuple[str, ...], arguments: Sequence[RunArgument]) -> list[tuple[Path, Any]]:
    """Files to write, with the arrays that they get. Raises UsageError for a name that no array has, or no place."""
    arrays = {each.name: each.array for each in arguments if each.array is not None}
    found = []
    for save in saves:
        name, equals, path = save.partition("=")
        if not equals or not path:
            raise UsageError(f"--save {save}: write NAME=FILE.npy")
        if name not in arrays:
            known = ", ".join(arrays) or "none; arrays are written f32[8]:zeros or @file.npy"
            raise UsageError(f"--save {save}: no array argument is called {name}; there are: {known}")
        require_place(Path(path), "--save")
        found.append((Path(path), arrays[name]))
    return found


def _write(request: Request, record: RunRecord, ended: str, *outcome: Any) -> None:
    if request.json_path is not None:
        write_record(request.json_path, record, ended, *outcome)


def _digest(array: Any) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def _print_kernels(module: emulator.Module) -> None:
    """Kernels with their parameters, then variables."""
    out = results_console()
    for name in module.kernel_names:
        symbol = module.symbol(name)
        signature, parameters = read_symbol(symbol), module.parameters(symbol)
        kinds = signature.parameters if signature is not None else (None,) * len(parameters)
        print_line(out, "kernel    ", name)
        for number, (parameter, kind) in enumerate(zip(parameters, kinds, strict=True)):
            print_line(out, f"  args[{number}]  ", f"{parameter_words(parameter, kind)}, {parameter.nbytes} bytes")
    _print_templates(module.templates)
    for variable, nbytes in module.variables.items():
        print_line(out, "variable  ", f"{variable}, {nbytes} bytes")


def _print_templates(names: Sequence[str]) -> None:
    out = results_console()
    for name in names:
        print_line(out, "template  ", f"{name}, of which --kernel names an instance: --kernel '{name}<float>'")
