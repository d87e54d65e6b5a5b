"""The pytest plugin in runs of pytest's own: one item a case, skips that say why, failures in smoke's words, xdist."""

from __future__ import annotations

import dataclasses
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from provider_helper import Change, engine_in

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Loaded here once: pytester forgets what a run inside this process was the first to load.
import g4kv_cli.device.emulated_device  # noqa: F401
from g4kv_cli.cases.case import Case
from g4kv_cli.cases.gate import gate_cases
from g4kv_cli.commands.asked import Asked
from g4kv_cli.commands.pytest_run import CasesUnderPytest
from g4kv_cli.commands.smoke import Request, cases_of
from g4kv_cli.main import run as g4kv
from g4kv_cli.model.geometry import select_geometries
from g4kv_cli.records.run import CaseResult, Status

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[2]
CLOSED = "prep/12b-local/*/closed-form"
WRONG: Change = ("kernels.cu", "max(0, position - window_left)", "max(0, position - window_left - 1)")


@pytest.fixture
def run(pytester: pytest.Pytester, request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    """Pytest with the plugin: the installed one's, or by name where the package is not installed."""
    named = () if request.config.pluginmanager.has_plugin("g4kv") else ("-p", "g4kv_cli.pytest_plugin")

    def start(*arguments: str, in_process: bool = True) -> pytest.RunResult:
        runs = pytester.runpytest_inprocess if in_process else pytester.runpytest_subprocess
        # An id names its geometry; naming it too makes the tables of the other nine needless.
        one = ("--g4kv-geometry", "12b-local") if "--g4kv-case" in arguments else ()
        return runs(*named, "-p", "no:hypothesispytest", *one, *arguments)

    return start


def test_one_item_a_case_and_what_is_not_covered_is_a_skip_with_its_reason(pytester: pytest.Pytester, run) -> None:
    engine_in(pytester.path)
    own = pytester.makepyfile("def test_of_the_engines_own(): pass")
    done = run("--g4kv-provider", "kernels.toml", "--g4kv-case", CLOSED, "-rs", "-v", str(own))
    done.assert_outcomes(passed=4, skipped=1)
    assert done.ret == 0
    done.stdout.fnmatch_lines(
        [
            "g4kv device * emulated sm_90*",
            "g4kv kernels * example-kernels, manifests *",
            "g4kv declared example-kernels: traps = false",
            "*test_of_the_engines_own PASSED*",
            "*::prep/12b-local/contiguous/closed-form SKIPPED*",
            "*::prep/12b-local/decode/closed-form PASSED*",
            "SKIPPED*not covered: example-kernels has no entry qk_norm_rope_prefill_hd256_plain_into",
        ]
    )


def test_requests_of_ones_own(pytester: pytest.Pytester, run) -> None:
    """A line, and a file beside the run: the ids are smoke's for the same words."""
    engine_in(pytester.path)
    shape = "kv=35 q=3 window=16 heads=2/1"
    done = run("--g4kv-provider", "kernels.toml", "--g4kv-shape", shape, "-v")
    ids = [case.id for case in cases_of(Request(asked=Asked(None, shape, None)))]
    shown = [line.split()[0] for line in done.outlines if re.match(r"g4kv::\S+ (PASSED|SKIPPED)", line)]
    assert [one.partition("g4kv::")[2] for one in shown] == ids
    done.assert_outcomes(passed=8, skipped=6, warnings=2)
    (pytester.path / "one.json").write_text('{"workload": "one", "geometry": "12b-local", "requests": [{"kv_len": 5}]}')
    done = run("--g4kv-workload", "one.json", "--collect-only", "-q")
    assert "g4kv::attention/12b-local/decode/one/spread" in done.outlines
    done = run("--g4kv-workload", "one.json", "--g4kv-shape", shape)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done = run("--g4kv-shape", "kv=0")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["ERROR: g4kv: *kv*"])


def test_the_items_are_smokes_table_of_a_geometry(run) -> None:
    done = run("--g4kv-geometry", "12b-local", "--collect-only", "-q")
    ids = [line.partition("g4kv::")[2] for line in done.outlines if "g4kv::" in line]
    assert ids == [case.id for case in gate_cases(select_geometries("12b-local", 1))]


def test_keywords_and_markers_choose_among_them(pytester: pytest.Pytester, run) -> None:
    pytester.makepyfile("def test_other(): pass")
    done = run("--g4kv-geometry", "12b-local", "-k", "prep and decode and closed-form and not padding")
    cases = len(gate_cases(select_geometries("12b-local", 1)))
    done.assert_outcomes(passed=1, deselected=cases)
    done.stdout.fnmatch_lines([f"collected {cases + 1} items / {cases} deselected / 1 selected"])
    done = run("--g4kv-geometry", "12b-local", "-m", "not g4kv")
    assert done.parseoutcomes()["passed"] == 1


def test_a_failure_has_the_text_of_smoke(pytester: pytest.Pytester, run, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = str(engine_in(pytester.path, WRONG) / "kernels.toml")
    case = "attention/12b-local/decode/needle/window40"
    chosen = ["--geometry", "12b-local", "--case", case, "--device", "emulated"]
    assert g4kv(["smoke", "--provider", manifest, *chosen]) == 1
    shown = capsys.readouterr().out.splitlines()
    begin = next(at for at, line in enumerate(shown) if "FAILED" in line)
    want = [line.strip() for line in shown[begin + 1 : -1]]
    assert len(want) > 3
    assert any(line.startswith("again") for line in want)
    done = run("--g4kv-provider", manifest, "--g4kv-case", case, "--g4kv-device", "emulated")
    done.assert_outcomes(failed=1)
    begin = next(at for at, line in enumerate(done.outlines) if line.startswith("FAILED  "))
    assert done.outlines[begin] == f"FAILED  {case}"
    assert [line.strip() for line in done.outlines[begin + 1 : begin + 1 + len(want)]] == want
    assert "Traceback" not in done.stdout.str()


def test_a_run_that_covers_nothing_fails(pytester: pytest.Pytester, run) -> None:
    engine_in(pytester.path)
    done = run("--g4kv-provider", "kernels.toml", "--g4kv-case", "prep/12b-local/contiguous/closed-form")
    done.assert_outcomes(skipped=1)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines(["g4kv: all 1 cases were skipped, so nothing was checked*"])


def test_what_is_left_out_of_a_case_that_passes_is_a_warning(run, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = CasesUnderPytest.run

    def partly(self: CasesUnderPytest, case: Case) -> tuple[CaseResult, str]:
        result, text = runs(self, case)
        return dataclasses.replace(result, left_out=("nobody has the split form",)), text

    monkeypatch.setattr(CasesUnderPytest, "run", partly)
    done = run("--g4kv-case", "prep/12b-local/decode/closed-form")
    done.assert_outcomes(passed=1, warnings=1)
    done.stdout.fnmatch_lines(["*PytestWarning: not covered in part: nobody has the split form"])


def test_xdist_spreads_the_items(pytester: pytest.Pytester, run) -> None:
    engine_in(pytester.path, WRONG)
    cases = ("--g4kv-case", CLOSED, "--g4kv-case", "attention/12b-local/decode/needle/window40")
    # Three processes, which would else read all modules of the package for asserts to rewrite.
    plain = ("--assert", "plain")
    done = run("--g4kv-provider", "kernels.toml", *cases, "-n", "2", "-v", *plain, in_process=False)
    done.assert_outcomes(passed=3, failed=1, skipped=1)
    assert set(re.findall(r"\[(gw\d)\].*::(?:prep|attention)/", done.stdout.str())) == {"gw0", "gw1"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--g4kv-provider", "none.toml"), "none.toml cannot be read"),
        (("--g4kv-geometry", "12b-locl"), "did you mean 12b-local"),
        (("--g4kv-case", "prep/12b-local/decode/closed"), "nearest: prep/12b-local/decode/closed-form"),
        (("--g4kv-geometry", "12b-local", "--g4kv-device", "tpu"), "unknown device 'tpu'"),
        (("--g4kv-geometry", "12b-local", "--g4kv-device", "emulated", "--g4kv-require-gpu"), "a GPU is required"),
        (("--g4kv-geometry", "12b-local", "--g4kv-case-timeout", "nan"), "must be a number of seconds"),
    ],
)
def test_a_wrong_request_ends_the_run_in_one_line(run, arguments: tuple[str, ...], says: str) -> None:
    done = run(*arguments)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in done.errlines if line.strip()]
    assert line.startswith("ERROR: g4kv: ")
    assert says in line


def test_the_fixtures(pytester: pytest.Pytester, run) -> None:
    engine_in(pytester.path)
    own = pytester.makepyfile(
        """
        import numpy as np

        def test_device(g4kv_device):
            assert g4kv_device.info.arch == "sm_80"
            array = g4kv_device.upload(np.arange(5), "five")
            assert g4kv_device.read(array).tolist() == [0, 1, 2, 3, 4]

        def test_provider(g4kv_provider):
            assert (g4kv_provider and g4kv_provider.name) == "example-kernels"
        """
    )
    arguments = ("--g4kv-device", "emulated:sm_80", "-m", "not g4kv", str(own))
    case = ("--g4kv-case", "prep/12b-local/decode/closed-form")
    run(*arguments, "--g4kv-provider", "kernels.toml", *case).assert_outcomes(passed=2, deselected=1)
    done = run(*arguments)
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["g4kv_provider = None"])
    done = run("--g4kv-device", "tpu", str(own), "-k", "device")
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["g4kv: unknown device 'tpu'*"])


def test_loading_the_plugin_costs_nothing() -> None:
    script = (
        "import sys, pytest, g4kv_cli.pytest_plugin\n"
        "pytest.main(['-p', 'g4kv_cli.pytest_plugin', '--version'])\n"
        "heavy = {'numpy', 'cuda', 'rich', 'click', 'ml_dtypes'}.intersection(sys.modules)\n"
        "own = [name for name in sys.modules if name.startswith('g4kv_cli')]\n"
        "print(sorted(heavy), sorted(own))\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] ['g4kv_cli', 'g4kv_cli.pytest_plugin']"


def test_pytest_finds_it_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"g4kv": "g4kv_cli.pytest_plugin"}


@pytest.fixture
def plugin() -> Iterator[Any]:
    """The plugin's module, which pytester would warn of if it stayed loaded without being a plugin of this run."""
    name = "g4kv_cli.pytest_plugin"
    was_there = name in sys.modules
    yield importlib.import_module(name)
    if not was_there:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("status", "raised"),
    [("passed", ""), ("failed", "CaseFailed"), ("error", "CaseFailed"), ("skipped", "Skipped"),
     ("not covered", "Skipped")],
)  # fmt: skip
def test_an_item_ends_as_its_case_did(status: Status, raised: str, plugin: Any) -> None:
    result = CaseResult("a/case", "entry", "12b-local", status, 0.0, "why")
    run = SimpleNamespace(run=lambda case: (result, "the text of smoke"))
    item = SimpleNamespace(config=SimpleNamespace(stash={plugin._RUN: run}), _case=None, user_properties=[])
    if not raised:
        plugin.CaseItem.runtest(item)
        return
    words = "the text of smoke" if raised == "CaseFailed" else "why"
    with pytest.raises((plugin.CaseFailed, pytest.skip.Exception), match=words) as ended:
        plugin.CaseItem.runtest(item)
    assert ended.type.__name__ == raised
