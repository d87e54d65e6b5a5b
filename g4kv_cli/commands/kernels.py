"""``g4kv kernels``: what each kernel takes on the chip, by arch; no GPU needed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from g4kv_cli.commands.options import kernels_option
from g4kv_cli.compiler import compile_with_log, find_source, kernels_digest, resource_usage, source_names
from g4kv_cli.compiler.occupancy import SM_LIMITS, occupancy
from g4kv_cli.compiler.toolkit import nvrtc_version
from g4kv_cli.entries.table import kernel_variants
from g4kv_cli.errors import EXIT_FINDINGS, DeviceUnavailable, UsageError
from g4kv_cli.records.files import require_place, write_whole
from g4kv_cli.report.kernels import KernelRow, kernels_json, print_kernels, while_compiling
from g4kv_cli.report.output import outlive_reader

DEFAULT_ARCH = "sm_90a"
OTHER_THREADS = 256
"""The block of kernels that are in no row of the table: the probes, the ceilings, and a directory's own."""


@click.command()
@click.option(
    "--arch",
    default=None,
    metavar="SM[,SM...]|all",
    help=f"sm_80, sm_90 or sm_90a, ..., or all.  [default: the GPU's, else {DEFAULT_ARCH}]",
)
@partial(kernels_option, with_own=True)
@click.option(
    "--check",
    "checked",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.cu|FILE.ptx",
    help="Instead, list what of this file's kernels the emulated device cannot run, by source line.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write the rows as JSON.",
)
def kernels(arch: str | None, kernels: Path | None, checked: Path | None, json_path: Path | None) -> int:
    """Registers, spills, stack, shared memory, code size and the occupancy bound of each kernel.

    Exit codes: 0 no kernel spills; 1 one does; 2 the request or the compiler failed. With --check: 0 the emulated
    device can run every kernel of the file; 1 it cannot.
    """
    outlive_reader(json_path)
    if json_path is not None:
        require_place(json_path, "--json")
    if checked is not None:
        if kernels is not None:
            raise UsageError("--check names one file and --kernels a directory; give one of them")
        if checked.suffix == ".ptx" and arch is not None:
            raise UsageError(f"--arch {arch}: PTX was made for an arch already; leave --arch out")
        from g4kv_cli.commands.kernels_check import check_file

        return check_file(checked, _archs(arch) if checked.suffix != ".ptx" else ("",), json_path)
    units = [(name, one) for one in _archs(arch) for name in source_names(kernels)]
    rows = [row for name, one in while_compiling(units) for row in _rows(name, one, kernels)]
    print_kernels(rows)
    if json_path is not None:
        write_whole(
            json_path, kernels_json(rows, nvrtc_version(), kernels_digest(source_names(kernels), kernels)), "--json"
        )
    return EXIT_FINDINGS if any(row.spill_bytes for row in rows) else 0


def _archs(asked: str | None) -> tuple[str, ...]:
    if asked is None:
        return (_gpu_arch() or DEFAULT_ARCH,)
    if asked == "all":
        return tuple(SM_LIMITS)
    found = []
    for name in (part.strip() for part in asked.split(",")):
        known = _known_arch(name)
        if not known:
            raise UsageError(f"--arch {name or repr(name)}: unknown; there are: all, {', '.join(SM_LIMITS)}")
        found.append(known)
    return tuple(dict.fromkeys(found))


def _known_arch(name: str) -> str:
    """The table's spelling of an arch that may lack its suffix (``sm_90`` is ``sm_90a``); empty if it has none."""
    return next((known for known in SM_LIMITS if name in (known, known.rstrip("af"))), "")


def _gpu_arch() -> str:
    """The first GPU's, if it is one that the table knows."""
    from g4kv_cli.device.open import open_device

    try:
        device = open_device("cuda")
    except DeviceUnavailable:
        return ""
    try:
        return _known_arch(device.info.arch)
    finally:
        device.close()


def _rows(name: str, arch: str, directory: Path | None) -> list[KernelRow]:
    unit = compile_with_log(find_source(name, directory), arch=arch, kind="cubin")
    table = kernel_variants()
    rows = []
    for usage in resource_usage(unit.log):
        known = table.get(usage.kernel)
        dynamic = 0 if known is None else known.shared_bytes
        threads = known.threads if known is not None else OTHER_THREADS
        bound = occupancy(
            SM_LIMITS[arch],
            threads=threads,
            registers=usage.registers,
            shared_bytes=usage.static_shared_bytes + dynamic,
        )
        rows.append(
            KernelRow(
                arch=arch,
                source=name,
                kernel=usage.kernel,
                threads=threads,
                registers=usage.registers,
                stack_bytes=usage.stack_bytes,
                spill_bytes=usage.spill_store_bytes + usage.spill_load_bytes,
                static_shared_bytes=usage.static_shared_bytes,
                dynamic_shared_bytes=dynamic,
                cubin_bytes=len(unit.image.data),
                blocks_per_sm=bound.blocks,
                occupancy=bound.share,
                bound=bound.bound,
            )
        )
    return rows
