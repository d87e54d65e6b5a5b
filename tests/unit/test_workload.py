"""Requests of one's own: files and lines are laid out as they say, and every fault of one names its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g4kv_cli.cases.attention import inputs
from g4kv_cli.cases.attention.case import AttentionCase
from g4kv_cli.cases.attention.inputs import expected_attention, make_attention_inputs
from g4kv_cli.cases.case import Case
from g4kv_cli.cases.prep.case import PrepCase
from g4kv_cli.cases.workload.table import workload_cases
from g4kv_cli.cases.workload.uncovered import UncoveredCase
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.model.request_text import KEYS, read_request
from g4kv_cli.model.workload import Workload
from g4kv_cli.model.workload_file import read_workload

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
MIXED: dict[str, Any] = {
    "workload": "mixed",
    "geometry": "12b-local",
    "page_size": 32,
    "requests": [
        {"kv_len": 96, "q_len": 96, "pages": [140, 3, 77]},
        {"kv_len": 1090, "q_len": 40, "page_origin": 0},
        {"kv_len": 300, "count": 2},
    ],
}


def _write(directory: Path, values: Any) -> Path:
    path = directory / "mixed.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def _changed(place: str, value: Any) -> dict[str, Any]:
    """MIXED with another value at ``a.0.b``; None takes it away."""
    values = json.loads(json.dumps(MIXED))
    *way, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    inner = values
    for part in way:
        inner = inner[part]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return values


def _one(text: str, geometry: str | None = None) -> Workload:
    return read_request(text, geometry)[1][0]


def _by_kind(cases: list[Case]) -> tuple[list[PrepCase], list[AttentionCase], list[UncoveredCase]]:
    return tuple(
        [case for case in cases if isinstance(case, kind)] for kind in (PrepCase, AttentionCase, UncoveredCase)
    )  # type: ignore[return-value]


def test_a_file_is_laid_out_as_it_says(tmp_path: Path) -> None:
    spec, (made,) = read_workload(_write(tmp_path, MIXED))
    assert [(one.kv_len, one.q_len, one.origin) for one in made.requests] == [
        (96, 96, 0), (1090, 40, 0), (300, 1, 0), (300, 1, 0)
    ]  # fmt: skip
    assert made.requests[0].pages == (140, 3, 77)
    assert [len(one.pages) for one in made.requests] == [3, 35, 10, 10]
    taken = [page for one in made.requests for page in one.pages]
    assert len(set(taken)) == len(taken)
    assert made.num_pages == 140 + 1 + 2
    assert (made.splits, made.padding_page, made.sm_scale) == ((3,), None, 1.0)
    assert spec.values == MIXED
    again = read_workload(tmp_path / "mixed.json")[1][0]
    assert again == made
    other = read_workload(_write(tmp_path, {**MIXED, "page_seed": 1}))[1][0]
    assert other.requests[0].pages == made.requests[0].pages
    assert other.requests[1].pages != made.requests[1].pages


def test_what_the_window_leaves_behind_is_released(tmp_path: Path) -> None:
    values = _changed("requests.1.page_origin", None)
    # The first new token stands at 1050, and a server keeps page 0 until key 31 is 1024 + 1 behind it.
    assert read_workload(_write(tmp_path, values))[1][0].requests[1].origin == 0
    values["requests"][1] |= {"kv_len": 1096}
    assert read_workload(_write(tmp_path, values))[1][0].requests[1].origin == 1
    assert read_workload(_write(tmp_path, {**values, "released": False}))[1][0].requests[1].origin == 0
    assert read_workload(_write(tmp_path, {**values, "window": 512}))[1][0].requests[1].origin == (1056 - 512) // 32
    made = read_workload(_write(tmp_path, {**values, "geometry": "12b"}))[1]
    assert [(one.geometry.name, one.requests[1].origin) for one in made] == [("12b-local", 1), ("12b-global", 0)]


def test_rules_of_pages(tmp_path: Path) -> None:
    values = _changed("pages", "contiguous") | {"padding": 2, "num_pages": 200}
    made = read_workload(_write(tmp_path, values))[1][0]
    # Page 0 is the padding's, 3, 77 and 140 are given; runs of 35, 10 and 10 are the first that are free.
    assert made.padding_page == 0
    assert [one.pages for one in made.requests[1:]] == [
        tuple(range(4, 39)), tuple(range(39, 49)), tuple(range(49, 59))
    ]  # fmt: skip
    # A run goes where it fits, past what is given if it must, and the pool grows with it.
    far = {**MIXED, "requests": [{"kv_len": 9, "pages": [5]}, {"kv_len": 224, "pages": "contiguous"}]}
    made = read_workload(_write(tmp_path, far))[1][0]
    assert made.requests[1].pages == tuple(range(6, 13))
    assert made.num_pages == 15
    with pytest.raises(UsageError, match=r"\$\.num_pages: 12 pages are too few: these rows need a pool of 13"):
        read_workload(_write(tmp_path, {**far, "num_pages": 12}))


FAULTS: list[tuple[str, Any, str]] = [
    ("workload", None, "$: lacks 'workload' (a string)"),
    ("workload", "a/b", "$.workload: 'a/b' is no name"),
    ("geometry", None, "$: lacks 'geometry' (a name or a file): give it here or as --geometry"),
    ("geometry", "12b-locl", "$.geometry: unknown geometry '12b-locl': did you mean 12b-local?"),
    ("geometry", "31b-global,none.toml", "none.toml cannot be read"),
    ("page_size", 0, "$.page_size: must be from 1 to 4096, got 0"),
    ("page_size", "16", "$.page_size: must be an integer, got a string"),
    ("requests", [], "$.requests: must be a list of at least one object"),
    ("requests", {}, "$.requests: must be a list of objects, got an object"),
    ("requests.2", 7, "$.requests[2]: must be an object, got an integer"),
    ("requests.2", {}, "$.requests[2]: lacks 'kv_len' (an integer)"),
    ("requests.2.kv_len", 0, "$.requests[2].kv_len: must be from 1 to 2147483647, got 0"),
    ("requests.2.kv_len", 300000, "$.requests[2].kv_len: 300000 is past the 262144 positions of 12b-local"),
    ("requests.2.kv_len", 2.0, "$.requests[2].kv_len: must be an integer, got a number"),
    ("requests.2.q_len", 301, "$.requests[2].q_len: must be from 0 to 300, got 301"),
    ("requests.2.qlen", 1, "$.requests[2].qlen: is no field here (nearest: q_len)"),
    ("requests.2.pages", [1], "$.requests[2].count: several requests cannot have the same pages"),
    ("requests.2.pages", "random", "$.requests[2].pages: must be a list of page ids or one of contiguous, permuted"),
    ("requests.0.pages", [1, -3, 4], "$.requests[0].pages[1]: must be an integer from 0 to"),
    ("requests.0.pages", [1, True, 4], "$.requests[0].pages[1]: must be an integer from 0 to"),
    ("requests.0.pages", [1, 4], "$.requests[0].pages: page 1 is the first that is there, and the oldest key"),
    ("requests.0.pages", [1, 4, 4], "$.requests[0].pages[2]: page 4 is of request 0 already"),
    ("requests.0.pages", [1, 2, 3, 4], "$.requests[0].pages: 4 pages of 32, but 96 keys take 3 from the first on"),
    ("requests.0.page_origin", 1, "$.requests[0].pages: 3 pages of 32, but 96 keys take 3 from the first on, 2 from"),
    ("requests.1.page_origin", 1, "$.requests[1].page_origin: page 1 is the first that is there, and the oldest"),
    ("num_pages", 90, "$.num_pages: 90 pages are too few: these rows need a pool of 141"),
    ("num_pages", 1 << 30, "$.num_pages: a pool of 1073741824 pages takes"),
    ("splits", [2, 0], "$.splits[1]: must be an integer from 1 to 65535, got 0"),
    ("splits", [2, 2], "$.splits: names a number twice"),
    ("window", 0, "$.window: must be from 1 to"),
    ("window", 300000, "$.window: must be from 1 to the 262144 positions, got 300000"),
    ("released", 1, "$.released: must be true or false, got an integer"),
    ("padding", -1, "$.padding: must be from 0 to 4096, got -1"),
    ("sm_scale", 0, "$.sm_scale: must be a finite number above 0, got 0"),
    ("requests.2.count", 5000, "$.requests[2].count: must be from 1 to 4096, got 5000"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value", "words"), FAULTS, ids=[f"{place}-{value}" for place, value, _ in FAULTS])
def test_a_fault_names_file_and_json_path(tmp_path: Path, place: str, value: Any, words: str) -> None:
    file = _write(tmp_path, _changed(place, value))
    with pytest.raises(UsageError) as error:
        read_workload(file)
    assert str(error.value).startswith(f"{file}: $")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", r"mixed\.json: \$: must be an object, got a list"),
        ("{", "is no JSON"),
        ('{"workload": "a", "workload": "b"}', "the key 'workload' stands twice in one object"),
        ('{"sm_scale": NaN}', "NaN is no JSON number"),
        ("\xff", "is no JSON"),
    ],
)
def test_files_that_are_no_workload(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mixed.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=words):
        read_workload(path)
    with pytest.raises(UsageError, match=r"nowhere\.json cannot be read: No such file"):
        read_workload(tmp_path / "nowhere.json")


def test_a_batch_without_tokens_and_a_window_that_no_family_has(tmp_path: Path) -> None:
    values = {**MIXED, "requests": [{"kv_len": 5, "q_len": 0}]}
    with pytest.raises(UsageError, match=r"\$\.requests: no request has a new token"):
        read_workload(_write(tmp_path, values))
    with pytest.raises(UsageError, match=r"\$\.window: 12b-global has no window: leave it out"):
        read_workload(_write(tmp_path, {**MIXED, "window": 64}), "12b-global")


def test_a_geometry_file_beside_the_workload(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text((EXAMPLES / "geometry.toml").read_text())
    made = read_workload(_write(tmp_path, {**MIXED, "geometry": "mine.toml:local"}))[1]
    assert [one.geometry.name for one in made] == ["draft-local"]


# --- one line --------------------------------------------------------------------------------------------------------


def test_a_line_is_a_request() -> None:
    made = _one("kv=1030 q=8 window=1024 heads=32/16 page=16 splits=4,9 head_dim=256")
    geometry = made.geometry
    assert (geometry.num_qo_heads, geometry.num_kv_heads, geometry.head_dim, geometry.window) == (32, 16, 256, 1024)
    assert geometry.name == "hd256-q32-kv16-w1024"
    assert made.splits == (4, 9)
    ((request,), origin) = made.requests, made.requests[0].origin
    assert (request.kv_len, request.q_len, origin, len(request.pages)) == (1030, 8, 0, 65)
    assert _one("kv=5").geometry == GEOMETRIES["12b-local"]
    assert _one("kv=5 head_dim=512").geometry == GEOMETRIES["12b-global"]
    assert _one("kv=5 window=7", "31b-local").geometry.name == "hd256-q32-kv16-w7"
    free = _one("kv=5 window=none k_eq_v=no head_dim=512 heads=6/2").geometry
    assert (free.name, free.window, free.k_eq_v, free.family) == ("hd512-q6-kv2", None, False, "global")
    wide = _one("kv=5 head_dim=512", "12b-local").geometry
    assert (wide.rotary_dim, wide.num_rotated_pairs, wide.window, wide.k_eq_v) == (512, 256, 1024, False)
    many = _one("kv=40 batch=3 padding=2 pages=contiguous page=8 scale=0.5 layers=4")
    assert [one.pages for one in many.requests] == [tuple(range(at, at + 5)) for at in (1, 6, 11)]
    assert (many.padding, many.padding_page, many.sm_scale, many.num_layers) == (2, 0, 0.5, 4)
    assert _one("kv=40 pages=9,4,2").requests[0].pages == (9, 4, 2)
    assert _one("kv=40 seed=1").requests != _one("kv=40 seed=2").requests


def test_a_name_tells_two_lines_apart() -> None:
    lines = ("kv=40", "kv=41", "kv=40 q=2", "kv=40 pages=9,4,2", "kv=40 splits=2,3", "kv=40 page=8", "kv=40 seed=4")
    names = [(one := _one(line)).geometry.name + "/" + one.name for line in lines]
    assert len(set(names)) == len(lines)
    assert all("/" not in name.split("/", 1)[1] and "," not in name for name in names)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "kv: must be an integer from 1 to 2147483647, it is not given"),
        ("kv", "'kv' is no key=value; write kv=1030"),
        ("kv=9 heads=16", "heads: '16' must be query heads/KV heads, such as 32/16"),
        ("kv=9 heads=16/3", "heads: 3 KV heads do not divide 16 query heads"),
        ("kv=9 head=16/8", "head: is no key (nearest: heads); the keys are kv, q, window,"),
        ("kv=9 kv=8", "kv: stands twice"),
        ("kv=x", "kv: must be an integer from 1 to 2147483647, got 'x'"),
        ("kv=9 q=10", "q: must be from 1 to 9, got 10"),
        ("kv=9 q=0", "q: must be from 1 to 9, got 0"),
        ("kv=9 window=0", "window: must be from 1 to"),
        ("kv=9 page=5000", "page: must be from 1 to 4096, got 5000"),
        ("kv=9 splits=2,", "splits: must be an integer from 1 to 65535, it is not given"),
        ("kv=9 head_dim=128", "head_dim: no kernel is compiled for 128: compiled are 256 and 512"),
        ("kv=9 pages=1,2", "pages: 2 pages of 16, but 9 keys take 1 from the first on"),
        ("kv=30 pages=1,1", "pages: page 1 is of request 0 already"),
        ("kv=30 pages=1,2 batch=2", "pages: several requests cannot have the same pages: give a rule"),
        ("kv=30 pages=1,1073741824", "pages: a pool of 1073741827 pages takes"),
        ("kv=9000 origin=600", "origin: page 600 is the first that is there"),
        ("kv=9 scale=-1", "scale: must be a finite number above 0, got '-1'"),
        ("kv=9 k_eq_v=1", "k_eq_v: must be yes or no, got '1'"),
        ("kv=300000", "kv: 300000 is past the 262144 positions of 12b-local"),
    ],
)
def test_a_wrong_line_names_the_key(text: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        _one(text)
    assert str(error.value).startswith(f"--shape {text!r}: {words}")


def test_a_line_goes_with_one_geometry() -> None:
    with pytest.raises(UsageError, match="--geometry 12b means 12b-local, 12b-global: name one"):
        _one("kv=9", "12b")


def test_the_guide_has_every_key() -> None:
    guide = (EXAMPLES.parent / "workload.md").read_text()
    assert [key for key in KEYS if f"`{key}`" not in guide] == []


# --- cases -----------------------------------------------------------------------------------------------------------


def test_a_decode_batch_goes_through_every_form() -> None:
    made = read_workload(EXAMPLES / "chat_decode.json")[1][0]
    prep, attention, uncovered = _by_kind(workload_cases(made, seed=7))
    assert made.one_token_each
    assert {case.form for case in prep} == {"decode", "batch_prefill"}
    ids = {case.id.removeprefix("attention/e4b-local/") for case in attention}
    forms = ("prefill/chat-decode/small-tile", "prefill/chat-decode/large-tile", "decode/chat-decode",
             "decode-split/chat-decode/splits2", "decode-split/chat-decode/splits8")  # fmt: skip
    assert ids == {f"{form}/{kind}" for form in forms for kind in ("spread", "needles")} | {
        "decode/chat-decode/forms-agree", "merge/chat-decode/splits2", "merge/chat-decode/splits8"
    }  # fmt: skip
    assert {case.check for case in attention} == {"permuted", "alone", "forms", "merge"}
    assert {case.seed for case in (*prep, *attention)} == {7}
    # 13 requests and three of padding: 16 rows, of which the padding's are nobody's business.
    assert {len(case.requests) for case in attention} == {16}
    assert all(sum(one.is_padding for one in case.requests) == 3 for case in attention)
    assert {case.placement.padding_page for case in prep if case.placement} == {made.padding_page}
    assert [case.reason for case in uncovered] == [
        "the contiguous form takes the tokens of one request, this is a batch of 16",
        "the prefill form takes the tokens of one request, this is a batch of 16",
    ]


def test_chunks_are_not_for_decode_forms() -> None:
    made = read_workload(EXAMPLES / "chunked_prefill.json")[1][0]
    prep, attention, uncovered = _by_kind(workload_cases(made, seed=1))
    assert {case.form for case in prep} == {"batch_prefill"}
    assert {case.form for case in attention} == {"prefill"}
    entries = {case.entry: case.reason for case in uncovered}
    reason = "the decode-split form takes one new token a request, request 0 has 96"
    assert entries["batch_decode_split_paged_window_hd256_into"] == reason
    assert len(entries) == 6


def test_one_chunk_goes_through_the_forms_of_one_request() -> None:
    prep, attention, _ = _by_kind(workload_cases(_one("kv=1030 q=8"), seed=1))
    assert {case.form for case in prep} == {"contiguous", "prefill", "batch_prefill"}
    assert {case.against_contiguous for case in prep if case.form == "prefill"} == {True}
    assert {case.positions for case in prep} == {tuple(range(1022, 1030))}
    assert {case.check for case in attention} == {"permuted", "oracle"}
    assert {case.is_asked for case in attention} == {True}


def test_a_pool_that_is_never_on_the_host_keeps_its_pages() -> None:
    made = _one("kv=40000 window=none heads=16/16")
    assert made.num_layers == 1
    attention = _by_kind(workload_cases(made, seed=1))[1]
    assert {case.is_sparse for case in attention} == {True}
    assert "permuted" not in {case.check for case in attention}


def test_a_long_chunk_is_judged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle of a chunk whose scores do not fit at once: the same values, from queries a few at a time."""
    (case,) = [one for one in workload_cases(_one("kv=90 q=23 window=40 heads=4/2"), seed=1)
               if one.id.endswith("small-tile/needles")]  # fmt: skip
    assert isinstance(case, AttentionCase)
    tensors = make_attention_inputs(case)
    whole = expected_attention(case, tensors)
    sizes = []
    real = inputs.attend
    monkeypatch.setattr(inputs, "attend", lambda q, *rest, **named: (sizes.append(len(q)), real(q, *rest, **named))[1])
    monkeypatch.setattr(inputs, "MAX_ATTEND_ELEMS", 5 * 4 * len(tensors.k[0]))
    pieces = expected_attention(case, tensors)
    assert sizes == [5, 5, 5, 5, 3]
    assert np.allclose(pieces.value, whole.value, rtol=1e-12)
    assert np.allclose(pieces.lse, whole.lse, rtol=1e-12)
    # Fewer keys in a sum can only be rounded less.
    assert (pieces.rounding.limit <= whole.rounding.limit * (1 + 1e-9)).all()
    assert pieces.rounding.limit.min() > 0


def test_groups_without_a_kernel_say_what_is_compiled() -> None:
    with pytest.raises(UsageError, match="groups of 32, and no attention kernel takes them: compiled are groups of 1"):
        workload_cases(_one("kv=9 heads=32/1"), seed=1)
