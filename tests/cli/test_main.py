"""The command group: what it prints, its exit codes, and what it does not import."""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from g4kv_cli import __version__
from g4kv_cli import main as main_module
from g4kv_cli.compiler.cache import CACHE_DIRECTORY_VARIABLE
from g4kv_cli.errors import EXIT_FAILURE, EXIT_FINDINGS, CompileError, DeviceFault, DeviceUnavailable, UsageError
from g4kv_cli.report.output import EXIT_BROKEN_PIPE

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Add a subcommand ``probe`` that runs the given function."""

    def add(body) -> None:  # type: ignore[no-untyped-def]
        probe = click.Command("probe", callback=body, params=[click.Option(["--number"], type=int)])
        module = type(sys)("g4kv_probe_module")
        module.probe = probe  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "g4kv_probe_module", module)
        entry = main_module.CommandEntry("g4kv_probe_module", "probe", "A probe.")
        monkeypatch.setitem(main_module.COMMANDS, "probe", entry)

    return add


def _raising(error: BaseException):  # type: ignore[no-untyped-def]
    def body(number: int | None) -> None:
        raise error

    return body


def test_version(run_g4kv) -> None:  # type: ignore[no-untyped-def]
    done = run_g4kv("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"g4kv {__version__}\n", "")


def test_help_lists_every_command_and_needs_neither_numpy_nor_cuda() -> None:
    script = (
        "import json, sys\n"
        "from g4kv_cli.main import run\n"
        "code = run(['--help'])\n"
        "heavy = [name for name in ('numpy', 'cuda', 'rich', 'ml_dtypes') if name in sys.modules]\n"
        "heavy += [name for name in sys.modules if name.startswith('g4kv_cli.commands')]\n"
        "print(json.dumps([code, heavy]), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert json.loads(done.stderr) == [0, []]
    for name in main_module.COMMANDS:
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("name", sorted(main_module.COMMANDS))
def test_every_listed_command_exists_and_explains_itself(name: str) -> None:
    entry = main_module.COMMANDS[name]
    command = getattr(importlib.import_module(entry.module), entry.attribute)
    assert isinstance(command, click.Command)
    assert command.help
    with click.Context(command) as context:
        assert "--help" in command.get_help(context)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("wrong name; use the other"), 2, "g4kv: error: wrong name; use the other\n"),
        (UsageError("two\nlines"), 2, "g4kv: error: two lines\n"),
        (DeviceUnavailable("no driver; use another"), 2, "g4kv: error: no driver; use another\n"),
        (DeviceFault(["trap: prep.cu:3"], ["trap"]), 1, "g4kv: error: trap: prep.cu:3\n"),
        (CompileError("refused", "line one\nline two\n"), 2, "g4kv: error: refused\nline one\nline two\n"),
        (click.BadParameter("not this"), 2, "g4kv: error: Invalid value: not this; see g4kv probe --help\n"),
    ],
)
def test_an_expected_error_is_one_line_and_its_exit_code(command, capsys, error, code, line) -> None:  # type: ignore[no-untyped-def]
    command(_raising(error))
    assert main_module.run(["probe"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == line


def test_an_unexpected_error_names_itself_and_the_way_to_its_traceback(command, capsys) -> None:  # type: ignore[no-untyped-def]
    command(_raising(ZeroDivisionError("over\nzero")))
    assert main_module.run(["probe"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("g4kv: error: unexpected ZeroDivisionError: over zero at test_main.py:")
    assert "--traceback" in line


@pytest.mark.parametrize("arguments", [["--traceback", "probe"], ["probe", "--traceback"]])
def test_traceback_on_request(command, capsys, arguments) -> None:  # type: ignore[no-untyped-def]
    command(_raising(UsageError("wrong")))
    assert main_module.run(arguments) == 2
    text = capsys.readouterr().err
    assert "Traceback (most recent call last)" in text
    assert text.splitlines()[-1] == "g4kv: error: wrong"


def test_traceback_through_the_environment(command, capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("G4KV_TRACEBACK", "1")
    command(_raising(UsageError("wrong")))
    assert main_module.run(["probe"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_missing_package_is_named(command, capsys) -> None:  # type: ignore[no-untyped-def]
    command(_raising(ModuleNotFoundError("No module named 'rich'", name="rich.progress")))
    assert main_module.run(["probe"]) == 2
    want = "g4kv: error: the Python package rich is missing; install g4kv with: python -m pip install .\n"
    assert capsys.readouterr().err == want


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_command_decides_its_exit_code(command, code: int) -> None:  # type: ignore[no-untyped-def]
    command(lambda number: click.get_current_context().exit(code))
    assert main_module.run(["probe"]) == code
    command(lambda number: code)
    assert main_module.run(["probe"]) == code


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["prob"], "no such command 'prob'; did you mean 'probe'?"),
        (["zzz"], "no such command 'zzz'; there are: smoke"),
        (["--nonsense"], "--nonsense"),
        (["probe", "--number", "many"], "'many' is not a valid integer"),
        (["probe", "surplus"], "surplus"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(command, capsys, arguments, text) -> None:  # type: ignore[no-untyped-def]
    command(lambda number: None)
    assert main_module.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("g4kv: error: ")
    assert text in line
    assert line.endswith("--help")


def test_without_arguments_the_help_and_exit_2(run_g4kv) -> None:  # type: ignore[no-untyped-def]
    done = run_g4kv()
    assert done.returncode == 2
    assert "Commands:" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["smoke", "--geometry", ""], "--geometry"),
        (["smoke", "--geometry="], "--geometry"),
        (["smoke", "--case", " "], "--case"),
        (["smoke", "--golden", ""], "--golden"),
        (["smoke", "--device", ""], "--device"),
        (["reject", "--kernels", ""], "--kernels"),
        (["kernels", "--arch", ""], "--arch"),
        (["bench", "--peer", ""], "--peer"),
        (["bench", "--html="], "--html"),
        (["bench", ""], "an argument"),
        (["layout", "--check", "\t"], "--check"),
    ],
)
def test_an_empty_value_is_an_error_of_every_option(capsys, arguments: list[str], culprit: str) -> None:  # type: ignore[no-untyped-def]
    """A script's unset variable must not run something else than it names."""
    assert main_module.run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"g4kv: error: {culprit} is empty; give it a value or leave it out\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["smoke", "--list", "--geometry", ","],
        ["smoke", "--list", "--geometry", "12b-local,"],
        ["layout", "--no-probe", "--geometry", "12b-local,,31b"],
        ["kernels", "--arch", "sm_80,"],
        ["bench", "--dry-run", "--batch", "1,"],
        ["bench", "--dry-run", "--kv-len", ","],
        ["bench", "--dry-run", "--geometry", ",12b"],
        ["bench", "--dry-run", "--peer", ","],
    ],
)
def test_an_empty_place_in_a_list_is_an_error(capsys, arguments: list[str]) -> None:  # type: ignore[no-untyped-def]
    assert main_module.run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1


def test_options_can_come_from_the_environment(command, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    seen = []
    command(lambda number: seen.append(number))
    monkeypatch.setenv("G4KV_PROBE_NUMBER", "41")
    assert main_module.run(["probe"]) == 0
    assert seen == [41]


def test_an_interrupt_is_130(command, capsys) -> None:  # type: ignore[no-untyped-def]
    command(_raising(KeyboardInterrupt()))
    assert main_module.run(["probe"]) == 130
    assert capsys.readouterr().err == "g4kv: interrupted\n"


_SLOW = (
    "import sys, time\n"
    "import click\n"
    "from g4kv_cli import main\n"
    "module = type(sys)('slow_module')\n"
    "def body():\n"
    "    click.echo('ready')\n"
    "    {work}\n"
    "module.slow = click.Command('slow', callback=body)\n"
    "sys.modules['slow_module'] = module\n"
    "main.COMMANDS['slow'] = main.CommandEntry('slow_module', 'slow', '')\n"
    "sys.argv[1:] = ['slow']\n"
    "main.main()\n"
)


def test_ctrl_c_ends_a_process_with_130() -> None:
    # A process started in the background may ignore the signal, and its children with it: as at a terminal instead.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", heed + _SLOW.format(work="time.sleep(60)")],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == "g4kv: interrupted\n"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW.format(work="[click.echo('x' * 1000) for _ in range(10000)]")],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=20) == 141
    assert errors == ""
    process.stderr.close()


def test_a_full_disk_is_an_error_in_words(command, capsys) -> None:  # type: ignore[no-untyped-def]
    command(_raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert main_module.run(["probe"]) == 2
    assert "No space left on device" in capsys.readouterr().err


def test_a_variable_stands_for_each_option_by_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not by the name that the argument has in the code."""
    context = click.Context(main_module.cli)
    for name in main_module.COMMANDS:
        command = main_module.cli.get_command(context, name)
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option) and option.envvar not in ("G4KV_DEVICE", "G4KV_REQUIRE_GPU"):
                words = max(option.opts, key=len)[2:].replace("-", "_")
                assert option.envvar == f"G4KV_{name}_{words}".upper()
    monkeypatch.setenv("G4KV_LAYOUT_GEOMETRY", "31b-global")
    monkeypatch.setenv("G4KV_LAYOUT_JSON", str(tmp_path / "layout.json"))
    monkeypatch.setenv("G4KV_LAYOUT_AT", "page=1,layer=0,kv=k,slot=0,head=0,dim=0")
    assert main_module.run(["layout"]) == 0
    assert json.loads((tmp_path / "layout.json").read_text())["at"]["page"] == 1
    assert "element offset 655360," in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "option"), [("G4KV_PROBE_NUMBER", "--number"), ("G4KV_DEVICE", "--device"), ("", "--number")]
)
def test_a_bad_value_from_the_environment_names_its_variable(
    variable: str, option: str, command, monkeypatch, capsys
) -> None:  # type: ignore[no-untyped-def]
    command(lambda **values: None)
    probe = sys.modules["g4kv_probe_module"].probe  # type: ignore[attr-defined]
    probe.params.append(click.Option(["--device"], type=int, envvar="G4KV_DEVICE", show_envvar=True))
    words = ["probe"] if variable else ["probe", "--number", "x"]
    if variable:
        monkeypatch.setenv(variable, "x")
    assert main_module.run(words) == 2
    told = capsys.readouterr().err
    assert f"Invalid value for '{option}'" in told
    assert (f"(env var: '{variable}')" in told) == bool(variable)
    assert told.count("env var") == bool(variable)


@pytest.mark.parametrize(("said", "shown"), [("Unable to allocate 37 GiB", ": Unable to allocate 37 GiB"), ("", "")])
def test_a_lack_of_memory_is_one_line(command, capsys, said: str, shown: str) -> None:  # type: ignore[no-untyped-def]
    command(_raising(MemoryError(said) if said else MemoryError()))
    assert main_module.run(["probe"]) == 2
    words = f"g4kv: error: this machine lacks the memory{shown}; ask for less, or run it where there is more\n"
    assert capsys.readouterr().err == words


def test_help_says_the_exit_codes_and_the_environment(run_g4kv) -> None:  # type: ignore[no-untyped-def]
    shown = run_g4kv("--help").stdout
    codes = {line.split()[0] for line in shown.splitlines() if line.split() and line.split()[0].isdigit()}
    want = {0, EXIT_FINDINGS, EXIT_FAILURE, main_module.EXIT_INTERRUPTED, EXIT_BROKEN_PIPE}
    assert {int(code) for code in codes} == want
    names = ("DEVICE", "EMULATOR", "EMULATOR_THREADS", "REQUIRE_GPU", "TRACEBACK")
    for variable in (CACHE_DIRECTORY_VARIABLE, *(f"G4KV_{name}" for name in names)):
        assert f"  {variable} " in shown
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert all(f"\n| {code} | " in readme for code in codes)
    assert CACHE_DIRECTORY_VARIABLE in readme
