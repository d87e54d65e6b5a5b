"""The JUnit XML of a run: one suite per geometry, one test case per case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from g4kv_cli.records.files import write_whole
from g4kv_cli.records.run import CaseResult, RunInfo
from g4kv_cli.report.console import mismatch_lines

OPTION = "--junit"


def write_junit(
    path: Path, run: RunInfo, results: Sequence[CaseResult], planned: int, command: str = "smoke", ended: str = ""
) -> None:
    """Replace ``path`` by the XML of these results of ``g4kv <command>``. Raises UsageError if it cannot be written.

    Every suite has the properties of run_properties. Fewer results than ``planned`` end in a test case of their own,
    which is an error: half a run is no success. ``ended`` goes on with its message.
    """
    xml = JUnitXml(f"g4kv {command}")
    for geometry in dict.fromkeys(result.geometry for result in results):
        suite = _suite(geometry, run)
        for result in results:
            if result.geometry == geometry:
                suite.add_testcase(_test_case(result))
        xml.add_testsuite(suite)
    if len(results) < planned:
        case = TestCase("the whole run", classname=f"g4kv {command}")
        case.result = [Error(f"the run ended after {len(results)} of {planned} cases{ended}")]
        suite = _suite(f"g4kv {command}", run)
        suite.add_testcase(case)
        xml.add_testsuite(suite)
    statistics: Any = xml  # junitparser has no annotations
    statistics.update_statistics()
    text = statistics.tostring()
    write_whole(path, text.decode() if isinstance(text, bytes) else text, OPTION)


def run_properties(run: RunInfo) -> dict[str, str]:
    """What tells two runs apart: device, kernels, seed, and the versions of what took part."""
    device = run.device
    return {
        "device": device.name,
        "device_kind": device.kind,
        "arch": device.arch,
        "driver": device.driver,
        "nvrtc": run.nvrtc,
        "kernels": run.provider or run.kernels_directory or "built in",
        "kernels_digest": run.kernels_digest,
        "git_commit": run.git_commit,
        "seed": str(run.seed),
        "date": run.date,
        **{f"version_{package}": version for package, version in run.versions.items()},
    }


def _suite(name: str, run: RunInfo) -> Any:
    """An empty suite with its properties, which the JUnit schema has before the cases."""
    suite: Any = TestSuite(name)  # junitparser has no annotations
    for prop, value in run_properties(run).items():
        if value:
            suite.add_property(prop, value)
    return suite


def _test_case(result: CaseResult) -> TestCase:
    case = TestCase(result.id, classname=result.entry, time=result.seconds)
    details = [*result.reason.splitlines()]
    details += [line for mismatch in result.mismatches for line in mismatch_lines(mismatch)]
    headline = details[0] if details else result.status
    if result.status == "not covered":
        headline = f"not covered: {headline}"
    kinds = {"failed": Failure, "error": Error, "skipped": Skipped, "not covered": Skipped}
    if result.status in kinds:
        outcome = kinds[result.status](headline)
        if result.status in ("failed", "error"):
            outcome.text = "\n".join([*details, f"again: {result.rerun}"])
        case.result = [outcome]
    return case
