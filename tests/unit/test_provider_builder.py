"""Builders that misbehave: each is one line that says what happened, and nothing of it is taken for a result later."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tempfile
import time
from pathlib import Path

import pytest

from g4kv_cli.errors import CompileError
from g4kv_cli.main import run as g4kv
from g4kv_cli.providers import builder
from g4kv_cli.providers.builder import built
from g4kv_cli.providers.manifest import Image

PTX = ".version 8.0\\n.target sm_90\\n.visible .entry kernel() { ret; }\\n"
FACTS = json.dumps({"threads": 128, "shared": 64, "arguments": ["q", "out"], "null_pointers": 2})
WHOLE = f"printf '{PTX}' > $0; printf '{FACTS}' > ${{0%.ptx}}.json"
"""``$0`` is the path of the PTX, ``$1`` the constants."""

pytestmark = pytest.mark.usefixtures("fresh_cache")


def _image(script: str, seconds: int = 20) -> Image:
    return Image("built", "builder", command=("sh", "-c", script), seconds=seconds)


def test_what_a_builder_leaves_is_taken_and_made_once(tmp_path: Path) -> None:
    image = _image(f"echo once >> {tmp_path}/runs; {WHOLE}")
    for _ in range(2):
        facts = built(image, '{"D": 256}', tmp_path)
    assert facts.ptx is not None
    assert ".entry kernel" in facts.ptx.read_text()
    assert (facts.arguments, facts.names["built_threads"], len(facts.trailing)) == (("q", "out"), 128, 2)
    assert (tmp_path / "runs").read_text() == "once\n"
    built(image, '{"D": 512}', tmp_path)
    assert (tmp_path / "runs").read_text() == "once\nonce\n", "other constants are another build"


def test_a_change_of_what_a_builder_reads_is_another_build(tmp_path: Path) -> None:
    read = tmp_path / "kernels.py"
    image = dataclasses.replace(_image(f"echo once >> {tmp_path}/runs; {WHOLE}"), files=(read,))
    for text in ("one", "two", "one"):
        read.write_text(text)
        built(image, "{}", tmp_path)
    assert (tmp_path / "runs").read_text() == "once\nonce\n"


def test_a_user_without_a_cache_has_one_folder_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder.cache, "cache_directory", lambda: None)
    monkeypatch.setattr(builder, "_own_folder", functools.cache(builder._own_folder.__wrapped__))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        built(_image(f"echo once >> {tmp_path}/runs; {WHOLE}"), "{}", tmp_path)
    assert (tmp_path / "runs").read_text() == "once\n"
    assert len(list(tmp_path.glob("g4kv-*"))) == 1


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo first >&2; echo 'no such kernel' >&2; exit 3", "builder of image built failed with 3: no such kernel"),
        ("echo only here; exit 1", "failed with 1: only here"),
        ("exit 1", "failed with 1: no output"),
        ("kill -SEGV $$", "was ended by SIGSEGV: no output"),
        (r"printf '\377\376\001\033[31mred\n' >&2; exit 1", "failed with 1: \ufffd\ufffd??[31mred"),
        ("true", "left no built_"),
        (f"printf '{PTX}' > $0", "beside the PTX: No such file or directory"),
        (WHOLE + "; printf '{\"threads\": 12' > ${0%.ptx}.json", "that is no JSON: "),
        (WHOLE + "; echo '[1]' > ${0%.ptx}.json", "must be an object, got list"),
        (WHOLE.replace("128", '"128"'), "'threads' in built_"),
        (WHOLE.replace("128", "4096"), "must be an integer from 0 to 1024, got 4096"),
        (WHOLE.replace('["q", "out"]', '"q out"'), "must be a list of names, got 'q out'"),
        (f"printf '{FACTS}' > ${{0%.ptx}}.json", "no such file"),
        (WHOLE + "; head -c 100 /dev/urandom > $0", "no .entry is in it"),
        (WHOLE + "; echo code > ${0%.ptx}.cubin", "machine code goes with both a .cubin"),
    ],
)
def test_a_builder_that_fails_is_one_line(tmp_path: Path, script: str, says: str) -> None:
    for _ in range(2):  # nothing of the first time may look like a result to the second
        with pytest.raises(CompileError) as caught:
            built(_image(script), "{}", tmp_path)
        first = str(caught.value).splitlines()[0]
        assert says in first, first
        assert first.isprintable(), repr(first)


def test_half_of_a_result_is_not_taken_when_the_builder_fails_behind_it(tmp_path: Path) -> None:
    image = _image(f"{WHOLE}; test -e {tmp_path}/good || exit 1")
    with pytest.raises(CompileError, match="failed with 1"):
        built(image, "{}", tmp_path)
    with pytest.raises(CompileError, match="failed with 1"):
        built(image, "{}", tmp_path)
    (tmp_path / "good").touch()
    assert built(image, "{}", tmp_path).arguments == ("q", "out")


def test_a_builder_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    begin = time.monotonic()
    script = f"echo working; sleep 60 & echo $! > {tmp_path}/child; wait"
    with pytest.raises(CompileError, match="did not end within 1 s; its last words: working"):
        built(_image(script, 1), "{}", tmp_path)
    assert time.monotonic() - begin < 20
    _require_ended(int((tmp_path / "child").read_text()))


def test_what_a_builder_leaves_running_is_ended_and_not_waited_for(tmp_path: Path) -> None:
    begin = time.monotonic()
    built(_image(f"{WHOLE}; sleep 60 & echo $! > {tmp_path}/child"), "{}", tmp_path)
    assert time.monotonic() - begin < 20
    _require_ended(int((tmp_path / "child").read_text()))


def test_no_such_command(tmp_path: Path) -> None:
    image = Image("built", "builder", command=("no-such-compiler",))
    with pytest.raises(CompileError, match="cannot be run: no-such-compiler: No such file or directory"):
        built(image, "{}", tmp_path)


def test_a_run_ends_with_the_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tmp_path / "slow.toml"
    manifest.write_text(
        'provider = "slow"\n[image.decode]\nbuilder = ["sh", "-c", "echo half > $0; sleep 60"]\nseconds = 1\n'
        '[[entry]]\nname = "batch_decode_paged_*"\n[[entry.launch]]\nimage = "decode"\ngrid = ["requests"]\n'
        '[entry.launch.named]\nq = "ptr q"\n'
    )
    words = ["smoke", "--device", "emulated", "--provider", str(manifest), "--jobs", "1"]
    assert g4kv([*words, "--case", "attention/12b-local/decode/ragged"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "builder of image decode did not end within 1 s. It may take longer with seconds = N in the image" in line


def _require_ended(process: int) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":  # ended, and nobody has asked
            return
        time.sleep(0.02)
    pytest.fail(f"process {process} still runs")
