"""Where the output goes astray: a reader that leaves, a full disk, an interrupt while modules are imported."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree

import pytest

from g4kv_cli import main
from g4kv_cli.records import files
from g4kv_cli.report.output import StandardStream

REPOSITORY = Path(__file__).resolve().parents[2]
BENCH_RECORD = REPOSITORY / "tests" / "data" / "bench" / "sample.json"
SMOKE = ["smoke", "--device", "emulated", "--jobs", "1", "--case", "prep/12b-local/prefill/*form*"]
FEW = "reject/batch_decode_paged_hd512_into/page_unique/*"
REJECT = ["reject", "--device", "emulated", "--host-only", "--case", FEW]
COMMANDS = {
    "smoke": (SMOKE, "--json"),
    "smoke to XML": (SMOKE, "--junit"),
    "reject": (REJECT, "--json"),
    "reject to XML": (REJECT, "--junit"),
    "layout": (["layout", "--no-probe", "--geometry", "all"], "--json"),
    "kernels": (["kernels", "--arch", "sm_90"], "--json"),
    "bench": (["bench", "--from", str(BENCH_RECORD)], "--dispatch"),
}


STARTED_ALONE = ("layout", "--help")
"""Commands that begin in a process of their own here; what the others import takes most of their time."""

FORKING = """
import json, os, runpy, signal, sys
import g4kv_cli.main, g4kv_cli.commands.bench, g4kv_cli.commands.kernels, g4kv_cli.commands.reject
import g4kv_cli.commands.smoke, g4kv_cli.device.emulated_device
for line in iter(sys.stdin.readline, ""):
    output, errors, arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
signal.alarm(120)
if output:
    writing = os.open(output, os.O_WRONLY)
else:
    reading, writing = os.pipe()
    os.close(reading)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(writing, 1)
os.dup2(os.open(errors, os.O_WRONLY), 2)
sys.argv[1:] = arguments
runpy.run_module("g4kv_cli", run_name="__main__", alter_sys=True)
"""
"""Runs one command after the other, each in a process that has the modules already, and ends as any other does."""

RunInto = Callable[..., tuple[int, str]]
"""Gives exit code and standard error of a process."""


@pytest.fixture(scope="module")
def forking():  # type: ignore[no-untyped-def]
    with subprocess.Popen(
        [sys.executable, "-c", FORKING], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@pytest.fixture
def run_into(forking, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """``g4kv`` with this file for its standard output; with a pipe that nobody reads where it has no name."""
    errors = tmp_path_factory.mktemp("errors") / "errors"

    def run(output: str, *arguments: str) -> tuple[int, str]:
        if arguments[0] in STARTED_ALONE:
            with open(output, "wb") if output else open_closed_pipe() as stream:
                done = subprocess.run(
                    [sys.executable, "-m", "g4kv_cli", *arguments],
                    cwd=REPOSITORY, stdout=stream, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
                )  # fmt: skip
            return done.returncode, done.stderr
        errors.write_text("", encoding="utf-8")
        forking.stdin.write(json.dumps([output, str(errors), arguments]) + "\n")
        forking.stdin.flush()
        return int(forking.stdout.readline()), errors.read_text(encoding="utf-8")

    return run


def open_closed_pipe() -> BinaryIO:
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "wb", buffering=0)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_name_that_the_output_cannot_have_is_escaped(encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding, newline="")
    output = StandardStream(stream)
    output.write("d\udcff/\u00e9.cu\n")
    output.flush()
    want = "d\\udcff/\u00e9.cu\n" if encoding == "utf-8" else "d\\udcff/\\xe9.cu\n"
    assert stream.buffer.getvalue() == want.encode()  # type: ignore[attr-defined]


def require_whole(path: Path, name: str) -> None:
    if name.endswith("XML"):
        root = ElementTree.parse(path).getroot()
        assert int(root.get("tests", "0")) > 0
        assert root.get("errors") == "0"
    else:
        assert json.loads(path.read_text(encoding="utf-8")).get("ended", "finished") == "finished"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_closed_pipe_is_no_finding_and_costs_no_file(name: str, run_into: RunInto, tmp_path: Path) -> None:
    arguments, option = COMMANDS[name]
    path = tmp_path / "file"
    assert run_into("", *arguments, option, str(path)) == (141, "")
    require_whole(path, name)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_that_has_no_place_is_told_before_any_work(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, option = COMMANDS[name]
    assert main.run([*arguments, option, "/nowhere/file"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"g4kv: error: {option} /nowhere/file: cannot write: No such file or directory")


@pytest.mark.parametrize("name", ["smoke", "reject", "layout", "kernels", "bench"])
def test_a_closed_pipe_ends_a_command_that_writes_no_file(name: str, run_into: RunInto) -> None:
    assert run_into("", *COMMANDS[name][0]) == (141, "")


@pytest.mark.parametrize("arguments", [["smoke", "--list"], ["reject", "--list"], ["--help"], ["bench", "--dry-run"]])
def test_a_closed_pipe_ends_what_only_prints(arguments: list[str], run_into: RunInto) -> None:
    assert run_into("", *arguments) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("name", ["smoke", "reject", "layout", "kernels", "bench"])
def test_a_full_disk_under_the_output_is_one_line_and_costs_no_file(
    name: str, run_into: RunInto, tmp_path: Path
) -> None:
    arguments, option = COMMANDS[name]
    path = tmp_path / "file"
    want = "g4kv: error: cannot write to standard output: No space left on device; free some space\n"
    for more in ([option, str(path)], []):
        assert run_into("/dev/full", *arguments, *more) == (2, want)
    require_whole(path, name)


def test_nobody_reads_the_error_line() -> None:
    """2>&1 | head -0"""
    with open_closed_pipe() as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "g4kv_cli", "smoke", "--geometry", "nowhere"],
            cwd=REPOSITORY, stdout=pipe, stderr=pipe, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 2


def test_a_closed_output_is_an_error_and_a_closed_stderr_none() -> None:
    for redirection, code in ((">&-", 2), ("2>&-", 0), (">/dev/null 2>&-", 0)):
        line = f'"{sys.executable}" -m g4kv_cli layout --no-probe {redirection}'
        done = subprocess.run(["sh", "-c", line], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == code, redirection
        want = "g4kv: error: cannot write to standard output: Bad file descriptor; send it to a file or a pipe\n"
        assert done.stderr == (want if code else "")


@pytest.fixture
def disk_full_after(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """From the given write on there is no space for files in ``tmp_path``; the kernel cache lies elsewhere."""

    def fill(whole_writes: int) -> None:
        move, done = os.replace, []

        def replace(source: str, target: str) -> None:
            if Path(target).parent == tmp_path:
                done.append(target)
                if len(done) > whole_writes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            move(source, target)

        monkeypatch.setattr(files.os, "replace", replace)

    return fill


@pytest.mark.parametrize("option", ["--json", "--junit"])
@pytest.mark.parametrize("arguments", [SMOKE, REJECT], ids=["smoke", "reject"])
def test_a_disk_that_fills_costs_the_file_and_no_verdict(
    arguments: list[str],
    option: str,
    disk_full_after: Callable[[int], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "file"
    disk_full_after(1)
    assert main.run([*arguments, option, str(path)]) == 2
    shown = capsys.readouterr()
    assert " 0 failed, 0 error, 0 skipped" in shown.out.splitlines()[-1]
    why = "cannot write: No space left on device; free some space there, or name a file elsewhere"
    assert shown.err == f"g4kv: error: {option} {path}: {why}\n"
    assert list(tmp_path.iterdir()) == [path]
    if option == "--json":
        assert json.loads(path.read_text(encoding="utf-8"))["ended"] == "still running, or killed"
    else:
        assert "the run ended after 0 of" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", [SMOKE, REJECT], ids=["smoke", "reject"])
def test_a_disk_that_is_full_from_the_start_is_known_before_the_first_case(
    arguments: list[str],
    disk_full_after: Callable[[int], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "file"
    path.write_text("the record of yesterday", encoding="utf-8")
    disk_full_after(0)
    assert main.run([*arguments, "--json", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert path.read_text(encoding="utf-8") == "the record of yesterday"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_costs_a_page_and_no_table(
    disk_full_after: Callable[[int], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, dispatch = tmp_path / "page.html", tmp_path / "dispatch.json"
    disk_full_after(1)
    words = ["bench", "--from", str(BENCH_RECORD), "--html", str(page), "--dispatch", str(dispatch)]
    assert main.run(words) == 2
    shown = capsys.readouterr()
    assert "which decode form" in shown.out
    assert shown.err.startswith(f"g4kv: error: --html {page}: cannot write: No space left on device; free")
    assert list(tmp_path.iterdir()) == [dispatch]


@pytest.mark.parametrize("module", ["click", "g4kv_cli.main", "numpy", "rich.console"])
def test_ctrl_c_while_modules_are_imported_ends_the_process_without_a_word(module: str) -> None:
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv[1:] = ['smoke', '--list']\n"
        "from g4kv_cli.start import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
