"""The pytest plugin: smoke's cases as items of somebody's own test run, one item a case, and two fixtures.

    pytest --g4kv-provider my-engine.toml [--g4kv-geometry 12b-local] [--g4kv-case 'attention/*'] [-n 8]
    pytest --g4kv-provider my-engine.toml --g4kv-shape 'kv=1030 q=8 window=1024 heads=32/16'

collects the cases beside whatever else the run has (``-m g4kv`` leaves them alone, ``-k`` chooses among them). A case
that the provider does not cover is skipped with the reason; a run whose cases were all skipped fails. Nothing but this
module is imported unless an option or a fixture asks for more.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from g4kv_cli.commands.pytest_run import CasesUnderPytest
    from g4kv_cli.device.interface import Device
    from g4kv_cli.providers.load import Providers

ROOT = "g4kv"
"""The first word of the items' ids, and their marker."""
_RUN: pytest.StashKey[CasesUnderPytest] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options; any of the first five collects cases."""
    group = parser.getgroup("g4kv", "gates for kernels of Gemma 4's paged KV cache")
    group.addoption(
        "--g4kv-provider", action="append", default=[], metavar="FILE.toml",
        help="run smoke's cases over the kernels that a manifest describes; repeatable",
    )  # fmt: skip
    group.addoption(
        "--g4kv-geometry", metavar="NAME[,NAME...]",
        help="the cases of these geometries (default: 12b-local, or where --g4kv-case says); "
        "without a provider, of the built-in kernels",
    )  # fmt: skip
    group.addoption(
        "--g4kv-case", action="append", default=[], metavar="ID", help="only this case, or those a glob matches"
    )
    group.addoption(
        "--g4kv-workload", metavar="FILE.json", help="the requests that a file describes in place of the table's cases"
    )
    group.addoption(
        "--g4kv-shape", metavar="'kv=N q=N ...'", help="one request in one line in place of the table's cases"
    )
    group.addoption(
        "--g4kv-device", default=os.environ.get("G4KV_DEVICE", "auto"), metavar="auto|cuda[:N]|emulated[:ARCH]",
        help="where kernels run (default: auto, the first CUDA GPU, else the emulated device)",
    )  # fmt: skip
    group.addoption(
        "--g4kv-require-gpu", action="store_true", default=os.environ.get("G4KV_REQUIRE_GPU", "") not in ("", "0"),
        help="fail if no CUDA GPU can be used, instead of running emulated",
    )  # fmt: skip
    group.addoption(
        "--g4kv-case-timeout", type=float, metavar="SECONDS", help="end a case after this time; 0: never (default: 60)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Read manifests and choose cases, where cases are asked for: what is wrong with them ends the run in one line."""
    config.addinivalue_line("markers", f"{ROOT}: a case of g4kv smoke (collected by the --g4kv options)")
    if hasattr(config, "workerinput"):  # of xdist: the other cores have workers of their own
        os.environ.setdefault("G4KV_EMULATOR_THREADS", "1")
    asked = config.option
    if not (asked.g4kv_provider or asked.g4kv_geometry or asked.g4kv_case or asked.g4kv_workload or asked.g4kv_shape):
        return
    # As the command does, before NumPy is there: its threads only spin beside those of xdist.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from g4kv_cli.commands.pytest_run import CasesUnderPytest
    from g4kv_cli.errors import G4kvError

    try:
        config.stash[_RUN] = CasesUnderPytest(
            providers=_providers(config),
            geometry=config.option.g4kv_geometry,
            case=tuple(config.option.g4kv_case),
            device=config.option.g4kv_device,
            require_gpu=config.option.g4kv_require_gpu,
            case_timeout=config.option.g4kv_case_timeout,
            workload=_file(config, config.option.g4kv_workload),
            shape=config.option.g4kv_shape,
        )
    except G4kvError as error:
        raise pytest.UsageError(f"g4kv: {error}") from error
    config.pluginmanager.register(Verdict(), f"{ROOT}-verdict")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Where the cases run, whose kernels, and what these declare."""
    return list(config.stash[_RUN].header) if _RUN in config.stash else []


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """The table stands beside the files that a run collects, behind the last of them."""
    report = yield
    if isinstance(collector, pytest.Session) and _RUN in collector.config.stash:
        report.result.append(Table.from_parent(collector, name=ROOT, nodeid=ROOT))
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the device."""
    if _RUN in config.stash:
        config.stash[_RUN].close()


class Verdict:
    """A run in which no case ran has checked nothing, and fails. Under xdist the reports of all workers come here."""

    def __init__(self) -> None:
        self._ran = self._skipped = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the cases."""
        if ROOT in report.keywords and report.when == "call":
            self._skipped += report.skipped
            self._ran += not report.skipped

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that would pass."""
        if self._checked_nothing and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say why."""
        if self._checked_nothing:
            words = f"g4kv: all {self._skipped} cases were skipped, so nothing was checked; pytest -rs shows why"
            terminalreporter.write_line(words, red=True)

    @property
    def _checked_nothing(self) -> bool:
        return self._skipped > 0 and self._ran == 0


class Table(pytest.Collector):
    """The cases."""

    def collect(self) -> list[pytest.Item]:
        """One item a case, in the table's order."""
        return [CaseItem.from_parent(self, name=case.id, case=case) for case in self.config.stash[_RUN].cases]


class CaseItem(pytest.Item):
    """One case."""

    def __init__(self, *, case: Any, **others: Any) -> None:
        super().__init__(**others)
        self._case = case
        self.add_marker(ROOT)

    def runtest(self) -> None:
        """Run it. What failed is raised with the text that g4kv smoke shows, what was not run is a skip."""
        result, text = self.config.stash[_RUN].run(self._case)
        self.user_properties += [
            (name, value)
            for name, value in (
                ("entry", result.entry), ("geometry", result.geometry), ("output_digest", result.output_digest),
            )
            if value
        ]  # fmt: skip
        for reason in result.left_out:
            warnings.warn(pytest.PytestWarning(f"not covered in part: {reason}"), stacklevel=1)
        if result.status == "not covered":
            pytest.skip(f"not covered: {result.reason}")
        if result.status == "skipped":
            pytest.skip(result.reason)
        if result.status != "passed":
            raise CaseFailed(text)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *others: Any, **more: Any) -> Any:
        """The case's own text, or one line of an error; a traceback only for what nobody expected."""
        from g4kv_cli.errors import G4kvError

        if isinstance(excinfo.value, CaseFailed | G4kvError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *others, **more)

    def reportinfo(self) -> tuple[Path, None, str]:
        """It stands in no file."""
        return Path(ROOT), None, self.name


class CaseFailed(Exception):
    """A case that did not pass, in the words of g4kv smoke."""


@pytest.fixture
def g4kv_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device of the test's own, opened as --g4kv-device says: nothing was launched on it yet."""
    from g4kv_cli.device.open import open_device

    with _failing_in_a_line():
        device = open_device(request.config.option.g4kv_device, request.config.option.g4kv_require_gpu)
    yield device
    device.close()


@pytest.fixture
def g4kv_provider(request: pytest.FixtureRequest) -> Providers | None:
    """The kernels of --g4kv-provider, for ``KernelLibrary``; without the option None, which is the built-in ones."""
    from g4kv_cli.providers.load import load_providers

    with _failing_in_a_line():
        return load_providers(_providers(request.config))


@contextmanager
def _failing_in_a_line() -> Iterator[None]:
    from g4kv_cli.errors import G4kvError

    try:
        yield
    except G4kvError as error:
        pytest.fail(f"g4kv: {error}", pytrace=False)


def _file(config: pytest.Config, name: str | None) -> Path | None:
    return None if name is None else config.invocation_params.dir / name


def _providers(config: pytest.Config) -> tuple[Path, ...]:
    from g4kv_cli.providers.named import named_providers

    there = config.invocation_params.dir
    named = named_providers()
    return tuple(
        named[name] if name in named and not (there / name).exists() else there / name
        for name in config.option.g4kv_provider
    )
