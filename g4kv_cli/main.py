"""The command ``g4kv``: finds the subcommand, and turns every error into one line and an exit code.

Subcommands are imported when they are called, so that ``g4kv --help`` imports neither NumPy nor CUDA. Exit
codes: 0 as expected; 1 findings (wrong, slower, not rejected); 2 usage or tool failure; 130 interrupted; 141 nobody
reads the output any more.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

import click
from click.core import ParameterSource
from click.exceptions import NoArgsIsHelpError

from g4kv_cli import __version__
from g4kv_cli.errors import EXIT_FAILURE, EXIT_FINDINGS, EXIT_INTERRUPTED, CompileError, G4kvError, UsageError
from g4kv_cli.interrupts import InterruptEndsProcess
from g4kv_cli.report.output import EXIT_BROKEN_PIPE, OutputLost, StandardStream, exit_code_of, lost_output_text

GARBAGE_THRESHOLDS = (10_000, 10, 10)
"""What lives long here are cases and translations, by the hundred thousand; by Python's own (700, 10, 10) they are
looked through again and again. Worker processes have these too where they are forked."""


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """Where a subcommand lives, and its line in the help of the group."""

    module: str
    attribute: str
    short_help: str


COMMANDS: dict[str, CommandEntry] = {
    "smoke": CommandEntry(
        "g4kv_cli.commands.smoke",
        "smoke",
        "Check every kernel that writes or reads the pool, on a GPU or without one.",
    ),
    "reject": CommandEntry(
        "g4kv_cli.commands.reject",
        "reject",
        "Check that contradictory requests fail on the host, and that kernels trap behind it.",
    ),
    "layout": CommandEntry(
        "g4kv_cli.commands.layout",
        "layout",
        "Show the paged pool of a geometry, convert offsets, check a stated layout.",
    ),
    "bench": CommandEntry(
        "g4kv_cli.commands.bench",
        "bench",
        "Time the kernels against the card's limits, and decide between the decode forms.",
    ),
    "run": CommandEntry(
        "g4kv_cli.commands.run",
        "run",
        "Run any CUDA kernel on the emulated device, with every check on.",
    ),
    "kernels": CommandEntry(
        "g4kv_cli.commands.kernels",
        "kernels",
        "Show registers, spills, shared memory and the occupancy bound of each kernel, by arch.",
    ),
    "provider": CommandEntry(
        "g4kv_cli.commands.provider",
        "provider",
        "Check a manifest of other people's kernels, or begin one for a library.",
    ),
    "merge": CommandEntry(
        "g4kv_cli.commands.merge",
        "merge",
        "Put the records of a run's parts (--shard) together again.",
    ),
}


EXIT_CODES: dict[int, str] = {
    0: "as expected",
    EXIT_FINDINGS: "something is wrong, slower or not refused",
    EXIT_FAILURE: "the request or a tool failed",
    EXIT_INTERRUPTED: "interrupted",
    EXIT_BROKEN_PIPE: "whoever read the output left; files asked for are still written",
}
ENVIRONMENT: dict[str, str] = {
    "G4KV_CACHE_DIR": "where compiled kernels are kept  [~/.cache/g4kv]",
    "G4KV_DEVICE": "--device of every command",
    "G4KV_EMULATOR": "native, interpreter or both (compared)  [native]",
    "G4KV_EMULATOR_THREADS": "threads of a launch on the emulated device  [one a core up to 16, 1 in workers]",
    "G4KV_REQUIRE_GPU": "--require-gpu of every command",
    "G4KV_TRACEBACK": "--traceback",
    "G4KV_COMMAND_OPTION": "any option, such as G4KV_SMOKE_GEOMETRY",
}
"""Variables that stand for options, or for what has none."""


@dataclass(slots=True)
class ErrorStyle:
    """Whether errors come with their traceback; the root context's ``obj``."""

    with_traceback: bool = False


def variable_of(command: str, option: click.Option) -> str:
    """The variable that stands for an option of a command, by the words that people write: ``G4KV_SMOKE_KV_FORMAT``."""
    words = max(option.opts, key=len).lstrip("-")
    return f"G4KV_{command}_{words}".replace("-", "_").upper()


def _ask_for_traceback(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    style = context.find_root().obj
    if value and isinstance(style, ErrorStyle):
        style.with_traceback = True


def _traceback_option(*, hidden: bool) -> click.Option:
    return click.Option(
        ["--traceback"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        hidden=hidden,
        callback=_ask_for_traceback,
        help="Print the traceback of an error (also G4KV_TRACEBACK=1).",
    )


class LazyGroup(click.Group):
    """A group that imports a subcommand when it is called, and lists all of them without importing any."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the subcommand; None if there is none of this name. It accepts ``--traceback`` too."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        with InterruptEndsProcess():
            command = getattr(importlib.import_module(entry.module), entry.attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.module}.{entry.attribute} is no click command")
        if not any("--traceback" in parameter.opts for parameter in command.params):
            command.params.append(_traceback_option(hidden=True))
        for option in command.params:
            if isinstance(option, click.Option) and option.envvar is None:
                option.envvar = variable_of(cmd_name, option)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with the nearest name in the message about an unknown one."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(COMMANDS)}"
            ctx.fail(f"no such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of subcommands from its own texts."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.short_help) for name, entry in COMMANDS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what holds for every command: exit codes and variables."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), text) for code, text in EXIT_CODES.items()])
        with formatter.section("Environment"):
            formatter.write_dl(list(ENVIRONMENT.items()))


@click.group(
    name="g4kv",
    cls=LazyGroup,
    params=[_traceback_option(hidden=False)],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="g4kv", message="%(prog)s %(version)s")
def cli() -> None:
    """Verify and measure the CUDA kernels that write and read Gemma 4's two-family paged KV cache."""


def main() -> None:
    """The console script."""
    # Arrays here are small: more threads of NumPy's linear algebra only spin beside the worker processes.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run ``g4kv`` with these arguments and return its exit code; errors go to stderr."""
    # A lost stderr never ends a run: there is nowhere left to say so.
    output, errors = StandardStream(sys.stdout), StandardStream(sys.stderr, outlived=True)
    with redirect_stdout(cast(TextIO, output)), redirect_stderr(cast(TextIO, errors)):
        try:
            code = _run(arguments)
            output.flush()
        except OutputLost:
            code = EXIT_BROKEN_PIPE
        if output.lost is not None and exit_code_of(code, output) == EXIT_FAILURE:
            errors.write(f"g4kv: error: {lost_output_text(output.lost)}\n")
        return exit_code_of(code, output)


def _run(arguments: Sequence[str]) -> int:
    style = ErrorStyle()
    try:
        _require_no_empty_argument(arguments)
        return _invoke(list(arguments), style)
    except NoArgsIsHelpError as error:
        error.show()
        return EXIT_FAILURE
    except click.ClickException as error:
        return _report(error, _click_message(error, arguments), style, EXIT_FAILURE)
    except G4kvError as error:
        text = str(error) if isinstance(error, CompileError) else " ".join(str(error).split("\n"))
        return _report(error, text, style, error.exit_code)
    except (KeyboardInterrupt, click.Abort) as interrupt:
        where = " ".join(str(interrupt).split())
        sys.stderr.write(f"g4kv: interrupted{f' at {where}' if where else ''}\n")
        return EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "g4kv_cli"):
            return _report(error, _unexpected_message(error), style, EXIT_FAILURE)
        message = f"the Python package {package} is missing; install g4kv with: python -m pip install ."
        return _report(error, message, style, EXIT_FAILURE)
    except MemoryError as error:
        text = f"this machine lacks the memory: {error}".rstrip(": ")
        return _report(error, f"{text}; ask for less, or run it where there is more", style, EXIT_FAILURE)
    except OutputLost:
        raise
    except Exception as error:
        return _report(error, _unexpected_message(error), style, EXIT_FAILURE)


def _require_no_empty_argument(arguments: Sequence[str]) -> None:
    """Raises UsageError for an empty name, value or list: a variable that a script left unset, never a wish."""
    before = ""
    for argument in arguments:
        name, has_value, value = argument.partition("=")
        if not argument.strip():
            what = before if before.startswith("-") else "an argument"
            raise UsageError(f"{what} is empty; give it a value or leave it out")
        if name.startswith("--") and has_value and not value.strip():
            raise UsageError(f"{name} is empty; give it a value or leave it out")
        before = argument


def _invoke(arguments: list[str], style: ErrorStyle) -> int:
    """Parse and run; a command may return its exit code or end with ``context.exit(code)``."""
    try:
        with cli.make_context("g4kv", arguments, auto_envvar_prefix="G4KV", obj=style) as context:
            result = cli.invoke(context)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    return result if isinstance(result, int) else 0


def _click_message(error: click.ClickException, arguments: Sequence[str]) -> str:
    context = getattr(error, "ctx", None)
    # Some of click's errors come without their context.
    command = next((word for word in arguments if word in COMMANDS), None)
    path = context.command_path if context is not None else f"g4kv {command}" if command else "g4kv"
    return f"{error.format_message().rstrip('.')}{_whence(error)}; see {path} --help"


def _whence(error: click.ClickException) -> str:
    """Which variable a bad value is from, where it stands in an environment and click does not say so."""
    context, option = getattr(error, "ctx", None), getattr(error, "param", None)
    if not isinstance(context, click.Context) or not isinstance(option, click.Option) or option.show_envvar:
        return ""
    is_from_there = context.get_parameter_source(str(option.name)) is ParameterSource.ENVIRONMENT
    return f" (env var: {option.envvar!r})" if is_from_there else ""


def _unexpected_message(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(where[-1].filename).name}:{where[-1].lineno}" if where else ""
    text = " ".join(str(error).split())
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"unexpected {what}{place}; run it again with --traceback to see where it comes from"


def _report(error: BaseException, message: str, style: ErrorStyle, code: int) -> int:
    if style.with_traceback:
        traceback.print_exception(error)
    sys.stderr.write(f"g4kv: error: {message}\n")
    return code


if __name__ == "__main__":
    main()
