"""``g4kv smoke`` on the emulated device, in the test's own process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from g4kv_cli.main import run as g4kv


def smoke(record: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the record, {} where the run wrote none; ``arguments`` win over what stands here."""
    code = g4kv(["smoke", "--device", "emulated", "--jobs", "1", "--json", str(record), *arguments])
    return code, json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}


def chosen(cases: Iterable[str]) -> list[str]:
    """The options that choose these cases."""
    return [word for case in cases for word in ("--case", case)]
