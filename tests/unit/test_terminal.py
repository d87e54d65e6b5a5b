"""Tables and lines at any width: nothing is cut, nothing is broken inside a word, and a pipe gets whole lines."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from g4kv_cli import main
from g4kv_cli.report.terminal import blocks, print_entry, print_line, print_table

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLE = str(REPOSITORY / "tests" / "data" / "bench" / "sample.json")
WORDS = [
    "a",
    "sentence",
    "of",
    "several",
    "words,",
    "which",
    "may",
    "be",
    "wrapped",
    "between",
    "any",
    "two",
    "of",
    "them",
]


def console(width: int | None) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    if width is None:
        return Console(file=stream, soft_wrap=True, highlight=False), stream
    return Console(file=stream, soft_wrap=True, highlight=False, width=width, force_terminal=True,
                   color_system=None, legacy_windows=False), stream  # fmt: skip


def table() -> Table:
    made = Table(title="numbers", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column("kernel", no_wrap=True)
    for name in ("registers", "spills", "bound by"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("why")
    made.add_row("paged_decode_hd512_groups4", "255", "0 B", "shared memory", " ".join(WORDS))
    made.add_row("ceiling_empty", "4", "0 B", "threads", "")
    return made


@pytest.mark.parametrize("width", [20, 40, 50, 60, 80, 100, 120, 200])
def test_a_table_shows_every_word_within_the_terminal(width: int) -> None:
    out, stream = console(width)
    print_table(out, table())
    lines = stream.getvalue().splitlines()
    shown = " ".join(lines).split()
    for word in ("paged_decode_hd512_groups4", "registers", "255", "bound", "memory", "ceiling_empty", *WORDS):
        assert word in shown
    for line in lines:
        assert len(line.rstrip()) <= width or len(line.split()) == 1


def test_a_table_that_fits_is_one_and_a_narrow_one_is_stacked() -> None:
    wide, narrow = console(120), console(50)
    print_table(wide[0], table())
    print_table(narrow[0], table())
    assert wide[1].getvalue().splitlines()[2].split()[:4] == ["paged_decode_hd512_groups4", "255", "0", "B"]
    assert narrow[1].getvalue().splitlines()[:4] == [
        "numbers",
        "paged_decode_hd512_groups4",
        "  registers 255  spills 0 B",
        "  bound by shared memory",
    ]


def test_a_pipe_gets_whole_lines() -> None:
    out, stream = console(None)
    print_line(out, "device   ", " ".join([*WORDS] * 5))
    print_entry(out, Text("  ok  "), "entry", "1 passed", 200)
    print_table(out, table())
    assert stream.getvalue().splitlines()[0] == "device   " + " ".join([*WORDS] * 5)
    assert len(stream.getvalue().splitlines()[1]) == 6 + 200 + 1 + len("1 passed")
    assert "numbers" in stream.getvalue().splitlines()[2]


def test_a_line_is_wrapped_below_its_first_letter() -> None:
    out, stream = console(40)
    print_line(out, "device   ", " ".join(WORDS))
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("device   a sentence")
    assert all(line.startswith(" " * 9) and line[9] != " " for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == "device " + " ".join(WORDS)


@pytest.mark.parametrize(
    ("width", "want"),
    [
        (80, ["  ok    an_entry                                 1 passed"]),
        (30, ["  ok    an_entry      1 passed"]),
        (20, ["  ok    an_entry", "        1 passed"]),
    ],
)
def test_an_entrys_line_becomes_two(width: int, want: list[str]) -> None:
    out, stream = console(width)
    print_entry(out, Text("  ok    "), "an_entry", "1 passed", 40)
    assert stream.getvalue().splitlines() == want


@pytest.mark.parametrize(
    ("width", "want"), [(80, [(0, 4)]), (30, [(0, 2), (2, 4)]), (12, [(0, 1), (1, 2), (2, 3), (3, 4)])]
)
def test_columns_go_into_as_many_blocks_as_are_needed(width: int, want: list[tuple[int, int]]) -> None:
    found = blocks([8, 8, 8, 8], 7, console(width)[0])
    assert [(block.start, block.stop) for block in found] == want
    assert blocks([8, 8, 8, 8], 7, console(None)[0]) == [range(4)]


@pytest.mark.parametrize("width", [50, 60, 80])
@pytest.mark.parametrize(
    "arguments",
    [
        ["kernels", "--arch", "sm_80"],
        ["layout", "--no-probe", "--geometry", "12b", "--context", "4096"],
        ["bench", "--from", SAMPLE],
        ["bench", "--compare", SAMPLE, SAMPLE.replace("sample", "later")],
        ["bench", "--dry-run"],
        ["bench", "--list-peers"],
        ["smoke", "--device", "emulated", "--case", "prep/12b-local/*/closed-form"],
        ["reject", "--device", "emulated", "--host-only", "--case", "reject/*/gqa_group/*"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_every_command_keeps_to_a_narrow_terminal(
    arguments: list[str], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for a single word that is longer, such as a case's id or an entry's name."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert main.run(arguments) in (0, 1)
    for line in capsys.readouterr().out.splitlines():
        too_long = len(line.rstrip()) > width
        words = line.split()
        assert not too_long or max(map(len, words)) > width - 24, line
