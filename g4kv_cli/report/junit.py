"""The JUnit XML of a run: one suite per geometry, one test case per case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from g4kv_cli.records.run import CaseResult
from g4kv_cli.report.console import mismatch_lines
from g4kv_cli.report.files import write_whole

OPTION = "--junit"


def write_junit(path: Path, results: Sequence[CaseResult], planned: int, command: str = "smoke") -> None:
    """Replace ``path`` by the XML of these results of ``g4kv <command>``. Raises UsageError if it cannot be written.

    Fewer results than ``planned`` end in a test case of their own, which is an error: half a run is no success.
    """
    xml = JUnitXml(f"g4kv {command}")
    for geometry in dict.fromkeys(result.geometry for result in results):
        suite = TestSuite(geometry)
        for result in results:
            if result.geometry == geometry:
                suite.add_testcase(_test_case(result))
        xml.add_testsuite(suite)
    if len(results) < planned:
        case = TestCase("the whole run", classname=f"g4kv {command}")
        case.result = [Error(f"the run ended after {len(results)} of {planned} cases")]
        suite = TestSuite(f"g4kv {command}")
        suite.add_testcase(case)
        xml.add_testsuite(suite)
    statistics: Any = xml  # junitparser has no annotations
    statistics.update_statistics()
    text = statistics.tostring()
    write_whole(path, text.decode() if isinstance(text, bytes) else text, OPTION)


def _test_case(result: CaseResult) -> TestCase:
    case = TestCase(result.id, classname=result.entry, time=result.seconds)
    details = [*result.reason.splitlines()]
    details += [line for mismatch in result.mismatches for line in mismatch_lines(mismatch)]
    headline = details[0] if details else result.status
    kinds = {"failed": Failure, "error": Error, "skipped": Skipped}
    if result.status in kinds:
        outcome = kinds[result.status](headline)
        if result.status != "skipped":
            outcome.text = "\n".join([*details, f"again: {result.rerun}"])
        case.result = [outcome]
    return case
