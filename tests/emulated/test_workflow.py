"""The workflow for GitHub Actions: the README's text and the file are one, it is YAML, and its commands run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from g4kv_cli import main
from g4kv_cli.compiler.cache import CACHE_DIRECTORY_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / ".github" / "workflows" / "kernels.yml"
# A case or two in place of hundreds; the options are the workflow's.
NARROWED = {"smoke": "prep/12b-local/prefill/closed-form", "reject": "reject/*/gqa_group/*"}


@pytest.fixture
def job() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, of the extra [test]")
    workflow = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    # YAML 1.1 reads a bare "on" as true.
    assert set(workflow) == {"name", True, "jobs"}
    (only,) = workflow["jobs"].values()
    return only  # type: ignore[no-any-return]


def test_the_readme_shows_the_file() -> None:
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.M)
    assert shown == FILE.read_text(encoding="utf-8")


def test_it_keeps_what_g4kv_compiles(job: dict[str, Any]) -> None:
    (cached,) = [step["with"] for step in job["steps"] if step.get("uses", "").startswith("actions/cache@")]
    assert job["env"][CACHE_DIRECTORY_VARIABLE] == "${{ github.workspace }}/" + cached["path"]


def test_its_commands_run_and_write_what_it_uploads(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(step["run"]) for step in job["steps"] if step.get("run", "").startswith("g4kv ")]
    assert [words[1] for words in commands] == list(NARROWED)
    for words in commands:
        assert main.run([*words[1:], "--device", "emulated", "--case", NARROWED[words[1]]]) == 0
    uploads = [step for step in job["steps"] if step.get("uses", "").startswith("actions/upload-artifact@")]
    (upload,) = uploads
    assert upload["if"] == "always()"
    assert sorted(upload["with"]["path"].split()) == sorted(path.name for path in tmp_path.iterdir())
