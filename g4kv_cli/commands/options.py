"""Options that several subcommands share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from g4kv_cli.cases.timeout import DEFAULT_CASE_TIMEOUT_SECONDS
from g4kv_cli.errors import UsageError
from g4kv_cli.model.kv_format import KV_FORMATS
from g4kv_cli.providers.named import named_providers, provider_file

if TYPE_CHECKING:
    from g4kv_cli.cases.dump import DumpSettings

_Function = TypeVar("_Function", bound=Callable[..., Any])


def require_two_files(json_path: Path | None, junit_path: Path | None) -> None:
    """Raises UsageError if both records would go to one file."""
    if json_path is not None and junit_path is not None and json_path.resolve() == junit_path.resolve():
        raise UsageError(f"--json and --junit both name {json_path}; give each a file of its own")


def geometry_option(
    words: str, *, name: str = "geometry", default: str | None = None
) -> Callable[[_Function], _Function]:
    """Add ``--geometry`` (argument ``name: str``), names and files alike; see select_geometries, which checks it.

    ``words``: what the command does without it, or with it.
    """
    return click.option(
        "--geometry",
        name,
        default=default,
        show_default=default is not None,
        metavar="NAME|FILE.toml[,...]",
        help="12b-local, 31b-global, ..., a model (12b), all, or a geometry of your own: a file (docs/geometry.md), "
        f"FILE.toml:local for one of its families. {words}".strip(),
    )


def kv_format_option(words: str, *, default: str | None = None) -> Callable[[_Function], _Function]:
    """Add ``--kv-format`` (argument ``kv_format``: one of KV_FORMATS, or the default). ``words``: what it decides."""
    return click.option(
        "--kv-format",
        "kv_format",
        type=click.Choice(KV_FORMATS),
        default=default,
        show_default=default is not None,
        help="How rows of K lie in the pool: whole (split) or, where V is made of raw K, their rotated columns alone "
        f"(folded). {words}",
    )


def case_timeout_option(function: _Function) -> _Function:
    """Add ``--case-timeout`` (argument ``case_timeout: float``, seconds; infinite where 0 was given)."""

    def _seconds(ctx: click.Context, param: click.Parameter, value: float) -> float:
        if not math.isfinite(value):
            raise click.BadParameter(f"{value} is no number of seconds; 0 means never", ctx, param)
        return value if value > 0 else math.inf

    return click.option(
        "--case-timeout",
        type=click.FloatRange(min=0),
        callback=_seconds,
        default=DEFAULT_CASE_TIMEOUT_SECONDS,
        show_default=True,
        metavar="SECONDS",
        help="End a case after this time (end to end: ten times that) and say where its kernel was. 0: never.",
    )(function)


def case_timeout_words(seconds: float) -> list[str]:
    """The option as it stands in a command that runs a case again; empty for the default."""
    if seconds == DEFAULT_CASE_TIMEOUT_SECONDS:
        return []
    return ["--case-timeout", f"{seconds:g}" if math.isfinite(seconds) else "0"]


def device_options(function: _Function) -> _Function:
    """Add ``--device`` (argument ``device: str``) and ``--require-gpu`` (``require_gpu: bool``).

    Both go to ``open_device``, which checks the text.
    """
    add_device = click.option(
        "--device",
        default="auto",
        show_default=True,
        metavar="auto|cuda[:N]|emulated[:ARCH]",
        envvar="G4KV_DEVICE",
        show_envvar=True,
        help="Where kernels run. auto takes the first CUDA GPU, else the emulated device, and says which.",
    )
    add_require = click.option(
        "--require-gpu",
        is_flag=True,
        envvar="G4KV_REQUIRE_GPU",
        show_envvar=True,
        help="Fail (exit 2) if no CUDA GPU can be used, instead of running emulated.",
    )
    return add_device(add_require(function))


def variant_option(function: _Function) -> _Function:
    """Add ``--variant`` (argument ``variant: str``): which kernels of entries that have several."""

    def _known(ctx: click.Context, param: click.Parameter, value: str) -> str:
        if value:
            from g4kv_cli.entries.table import kernel_variants  # late: --help needs no table

            kernels = kernel_variants().values()
            paths = list(dict.fromkeys(kernel.path for kernel in kernels))
            for name in value.split(","):
                if name not in (*paths, *(kernel.symbol for kernel in kernels)):
                    known = " or ".join(paths)
                    text = f"no kernel is of {name!r}; write {known}, or a name that g4kv kernels lists"
                    raise click.BadParameter(text, ctx, param)
        return value

    return click.option(
        "--variant",
        default="",
        callback=_known,
        metavar="PATH|KERNEL[,...]",
        help="Where an entry has several kernels, those of these paths (portable, sm_90a) or names alone, the first "
        "that runs.",
    )(function)


def require_one_origin(providers: Sequence[Path], kernels: Path | None, variant: str = "") -> None:
    """Raises UsageError if manifests are to run and the built-in kernels are chosen among as well."""
    for option, given in (("--kernels", kernels is not None), ("--variant", bool(variant))):
        if providers and given:
            raise UsageError(f"{option} is about the built-in kernels, and --provider runs others; give one of the two")


def dump_options(function: _Function) -> _Function:
    """Add ``--dump`` (argument ``dump: Path | None``) and ``--dump-all`` (``dump_all: bool``); see dump_settings."""
    add_directory = click.option(
        "--dump",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Write the arrays of each case that does not pass, one .npz a case, into this new or empty directory: "
        "inputs, metadata, got, want and limit (docs/dump.md).",
    )
    add_all = click.option("--dump-all", is_flag=True, help="With --dump: of each case that passes, too.")
    return add_directory(add_all(function))


def dump_settings(directory: Path | None, every: bool) -> DumpSettings | None:
    """What the two options mean. Raises UsageError."""
    from g4kv_cli.cases.dump import DumpSettings  # late: --help needs no numpy

    if directory is None and every:
        raise UsageError("--dump-all needs a directory: give --dump DIR too")
    return None if directory is None else DumpSettings(directory, every)


class ProviderFile(click.Path):
    """A manifest: a file, or the name of one that comes with g4kv."""

    name = "file or name"

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The file. Fails with the names where there is neither."""
        word = str(value)
        file = provider_file(word)
        if not file.exists():
            names = ", ".join(named_providers())
            self.fail(f"there is no file {word!r}, and no provider of this name comes with g4kv ({names})", param, ctx)
        return super().convert(str(file), param, ctx)


def provider_option(function: _Function, text: str = "") -> _Function:
    """Add ``--provider`` (argument ``provider: tuple[Path, ...]``)."""
    return click.option(
        "--provider",
        type=ProviderFile(),
        multiple=True,
        metavar="FILE.toml|NAME",
        help=text
        or "Run the kernels that a manifest describes, or a library by its name "
        f"({', '.join(named_providers())}), in place of the built-in ones; repeatable.",
    )(function)


def shard_option(function: _Function) -> _Function:
    """Add ``--shard`` (argument ``shard: Shard | None``): a part of the cases, for machines that run side by side."""

    def _part(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Any:
        if value is None:
            return None
        from g4kv_cli.cases.shard import Shard  # late: --help needs no cases

        return Shard.parse(value)

    return click.option(
        "--shard",
        callback=_part,
        metavar="I/N",
        help="Only the I-th of N parts of these cases; g4kv merge puts the parts' records together.",
    )(function)


def kernels_option(function: _Function, *, with_own: bool = False) -> _Function:
    """Add ``--kernels DIR`` (argument ``kernels: Path | None``), a directory that replaces some built-in file.

    ``with_own``: translation units of other names will do.
    """

    def _overlay(_ctx: click.Context, _param: click.Parameter, value: Path | None) -> Path | None:
        if value is not None:
            from g4kv_cli.compiler.sources import require_overlay  # late: --help needs no compiler

            require_overlay(value, with_own=with_own)
        return value

    return click.option(
        "--kernels",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        callback=_overlay,
        metavar="DIR",
        help="Kernel sources of your own; a file that DIR lacks is taken from the built-in ones.",
    )(function)
