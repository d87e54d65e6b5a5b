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
NARROWED = {"smoke": "prep/12b-local/prefill/closed-form*", "reject": "reject/*/gqa_group/*"}


@pytest.fixture
def jobs() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, of the extra [test]")
    workflow = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    # YAML 1.1 reads a bare "on" as true.
    assert set(workflow) == {"name", True, "jobs"}
    assert list(workflow["jobs"]) == ["g4kv", "merge"]
    return workflow["jobs"]  # type: ignore[no-any-return]


def test_the_readme_shows_the_file() -> None:
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.M)
    assert shown == FILE.read_text(encoding="utf-8")


def test_it_keeps_what_g4kv_compiles(jobs: dict[str, Any]) -> None:
    job = jobs["g4kv"]
    (cached,) = [step["with"] for step in job["steps"] if step.get("uses", "").startswith("actions/cache@")]
    assert job["env"][CACHE_DIRECTORY_VARIABLE] == "${{ github.workspace }}/" + cached["path"]


def test_its_commands_run_and_write_what_it_uploads(
    jobs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shards = jobs["g4kv"]["strategy"]["matrix"]["shard"]
    assert shards == [f"{at + 1}/{len(shards)}" for at in range(len(shards))]
    for index, shard in enumerate(shards):
        commands = _commands(jobs["g4kv"], index, shard)
        assert [words[1] for words in commands] == list(NARROWED)
        for words in commands:
            assert main.run([*words[1:], "--device", "emulated", "--case", NARROWED[words[1]]]) == 0
        assert _uploaded(jobs["g4kv"], index, tmp_path) == {f"smoke-{index}.json", f"reject-{index}.json"}
    for words in _commands(jobs["merge"], 0, ""):
        pattern = next(at for at, word in enumerate(words) if "*" in word)
        words[pattern : pattern + 1] = sorted(path.name for path in tmp_path.glob(words[pattern]))
        assert main.run(words[1:]) == 0
    whole = {path.name for path in tmp_path.iterdir() if "-" not in path.name}
    assert _uploaded(jobs["merge"], 0, tmp_path) == whole == {"smoke.json", "smoke.xml", "reject.json", "reject.xml"}


def _commands(job: dict[str, Any], index: int, shard: str) -> list[list[str]]:
    texts = [step["run"] for step in job["steps"] if step.get("run", "").startswith("g4kv ")]
    return [shlex.split(_filled(text, index, shard)) for text in texts]


def _filled(text: str, index: int, shard: str) -> str:
    filled = text.replace("${{ matrix.shard }}", shard).replace("${{ strategy.job-index }}", str(index))
    assert "${{" not in filled
    return filled


def _uploaded(job: dict[str, Any], index: int, folder: Path) -> set[str]:
    (upload,) = [step for step in job["steps"] if step.get("uses", "").startswith("actions/upload-artifact@")]
    assert upload["if"] == "always()"
    patterns = _filled(upload["with"]["path"], index, "").split()
    return {path.name for pattern in patterns for path in folder.glob(pattern)}
