"""The smoke table: what it has to have is in it, and every case is consistent by itself."""

from __future__ import annotations

import itertools
import pickle

import pytest

from g4kv_cli.cases.case import Case
from g4kv_cli.cases.gate import gate_cases
from g4kv_cli.cases.prep.case import PrepCase
from g4kv_cli.cases.prep.table import prep_cases
from g4kv_cli.cases.reject.run import reject_cases
from g4kv_cli.cases.select import select_cases
from g4kv_cli.cases.trap.table import SMOKE_NAMES, smoke_traps, trap_cases
from g4kv_cli.entries.table import entries
from g4kv_cli.errors import UsageError
from g4kv_cli.model.geometry import GEOMETRIES

ALL = [case for geometry in GEOMETRIES.values() for case in prep_cases(geometry)]


def _of(name: str, form: str) -> list[PrepCase]:
    return [case for case in ALL if case.geometry.name == name and case.form == form]


def test_ids_are_unique() -> None:
    assert len({case.id for case in ALL}) == len(ALL)


@pytest.mark.parametrize("page_size", [None, 1, 2, 16, 64, 256])
def test_every_case_is_consistent(page_size) -> None:
    cases = [case for geometry in GEOMETRIES.values() for case in prep_cases(geometry, page_size=page_size)]
    for case in cases:
        assert max(case.positions) < case.table_positions, case.id
        if case.placement is None:
            continue
        place = case.placement
        pages, slots = case.page_and_slot()
        assert all(0 <= page < place.num_pages for page in pages), case.id
        assert all(page >= place.num_pages for page in place.unread), case.id
        assert 0 <= place.layer < place.num_layers, case.id
        taken = [place_ for place_ in zip(pages, slots, strict=True) if place_[0] != place.padding_page]
        assert len(set(taken)) == len(taken), f"{case.id}: two tokens in one slot"
        if page_size is not None and case.form != "contiguous" and len(case.positions) < 100:
            assert place.page_size == page_size, case.id


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_what_each_paged_entry_is_run_with(name: str, form: str) -> None:
    cases = _of(name, form)
    places = [case.placement for case in cases if case.placement is not None]
    assert {1, 2, 5, 16, 17, 257} <= {len(case.positions) for case in cases}
    assert {1, 2, 16, 64, 256} <= {place.page_size for place in places}
    assert {"closed-form", "random", "tiny", "large"} == {case.kind for case in cases}
    assert len({case.seed for case in cases if case.kind == "random"}) >= 3
    assert len({case.rotary_dim for case in cases}) == 4
    assert 0 in {case.positions[0] for case in cases}
    assert any(max(case.positions) == case.table_positions - 1 for case in cases)
    assert any(place.num_pages - 1 in case.page_and_slot()[0] for case, place in zip(cases, places, strict=True))
    assert any(origin > 0 for place in places for origin in place.origins)
    assert any(place.layer > 0 for place in places)
    assert any(place.layer < place.num_layers - 1 for place in places)
    assert any(place.unread for place in places)
    assert max(case.pool_bytes for case in cases) > 2 << 31


def test_head_counts_of_the_global_family() -> None:
    cases = [case for case in ALL if case.geometry.head_dim == 512]
    assert {geometry.num_kv_heads for geometry in GEOMETRIES.values() if geometry.head_dim == 512} <= {
        case.geometry.num_kv_heads for case in cases
    }
    assert {case.entry for case in cases} == {
        f"{stem}_{form}_hd512_{tail}plain_into"
        for stem, tail in (("qk_norm_rope_paged", "k_eq_v_"), ("qkv_norm_rope_paged", ""))
        for form in ("prefill", "decode", "batch_prefill")
    }


@pytest.mark.parametrize("name", GEOMETRIES)
def test_what_a_few_bits_do_not_hold_is_run_in_every_form(name: str) -> None:
    """Positions past 12, 15 and 16 bits, rows past 255 pages and behind 65,536 entries, page ids past 16 bits, page
    sizes that are no power of two, and more KV heads than a warp serves, in few and in many tokens."""
    for form in ("prefill", "decode", "batch_prefill"):
        cases = _of(name, form)
        places = [case.placement for case in cases if case.placement is not None]
        positions = {position.bit_length() for case in cases for position in case.positions}
        assert {13, 16, 17} <= positions, form
        pages = [(case, place, case.page_and_slot()[0]) for case, place in zip(cases, places, strict=True)]
        assert any(page >= 1 << 16 and len(set(used)) > 1 for _, _, used in pages for page in used), form
        rows = [
            (position // place.page_size - place.origins[row])
            for case, place, _ in pages
            for position, row in zip(case.positions, case.token_rows, strict=True)
        ]
        assert max(rows) > 255, form
        begins = [sum(map(len, place.rows[:-1])) for place in places]
        assert form == "prefill" or max(begins) >= 1 << 16, form
        assert sum(place.page_size & (place.page_size - 1) != 0 for place in places) >= 3, form
        ends = [case for case in cases if case.judges_ends]
        elements = [len(c.positions) * c.geometry.num_qo_heads * c.geometry.head_dim for c in ends]
        assert min(elements) > 1 << 31, form
        assert all(case.ends.positions == (case.positions[0], case.positions[-1]) for case in ends), form
        many = [len(c.positions) for c in cases if c.geometry.num_kv_heads > 4 and c not in ends]
        assert len(many) >= 2, form
        assert max(many) > 10 * min(many), form


def test_closed_form_prefill_is_the_known_one() -> None:
    (case,) = select_cases(ALL, ["prep/12b-local/prefill/closed-form"])
    assert case.placement is not None
    assert (case.positions[0], len(case.positions)) == (1, 40)
    assert (case.placement.rows, case.placement.unread) == (((3, 7, 5),), (9,))
    assert (case.placement.layer, case.placement.num_layers, case.placement.num_pages) == (1, 2, 9)


def test_large_pools_straddle_the_edges() -> None:
    for form, edge in (("prefill", 2**31), ("decode", 2**32)):
        (case,) = [case for case in _of("12b-local", form) if "/pool/past" in case.id]
        place = case.placement
        assert place is not None
        page_elems = 40 * 2 * 16 * 8 * 256
        pages, _ = case.page_and_slot()
        assert min(pages) * page_elems < edge < max(pages) * page_elems
        assert any(page * page_elems <= edge < (page + 1) * page_elems for page in pages)


def test_decode_positions_are_unordered_and_padding_shares_a_page() -> None:
    (case,) = select_cases(ALL, ["prep/12b-local/decode/closed-form"])
    assert list(case.positions) != sorted(case.positions)
    (padded,) = select_cases(ALL, ["prep/12b-local/decode/padding/shared-page"])
    assert padded.placement is not None
    pages, slots = padded.page_and_slot()
    assert [page for page in pages if page == padded.placement.padding_page] == [0] * 5
    assert slots[3:] == [0] * 5


def test_selection() -> None:
    table = prep_cases(GEOMETRIES["12b-local"])
    assert select_cases(table, ["prep/12b-local/decode/*"]) == [case for case in table if case.form == "decode"]
    assert [case.id for case in select_cases(table, ["prep/12b-local/prefill/start/zero"])] == [
        "prep/12b-local/prefill/start/zero"
    ]
    with pytest.raises(UsageError, match="nearest: prep/12b-local/prefill/start/zero"):
        select_cases(table, ["prep/12b-local/prefill/start/zer"])
    with pytest.raises(UsageError, match="no case 'prep/31b"):
        select_cases(table, ["prep/31b-local/*"])
    with pytest.raises(UsageError, match="no case is selected"):
        select_cases([], [])


@pytest.mark.parametrize("page_size", [0, -1, 4097])
def test_page_size_out_of_range(page_size: int) -> None:
    with pytest.raises(UsageError, match="--page-size must be from 1 to 4096"):
        gate_cases([GEOMETRIES["12b-local"]], page_size=page_size)


def test_seed_moves_all_random_data() -> None:
    first, second = (prep_cases(GEOMETRIES["12b-local"], seed=seed) for seed in (1, 50))
    seeds = [{case.seed for case in table if case.kind == "random"} for table in (first, second)]
    assert not seeds[0] & seeds[1]


def test_every_entry_traps_once_and_every_geometry_can() -> None:
    geometries = list(GEOMETRIES.values())
    once = smoke_traps(geometries, once_an_entry=True)
    assert len(once) == len({(case.entry, case.smoke_name) for case in once})
    assert {case.entry for case in once} == {entry.name for entry in entries("prep") if entry.has_pool}
    every = smoke_traps(geometries, once_an_entry=False)
    names = [(form, name) for form, named in SMOKE_NAMES.items() for name in named]
    assert {case.id for case in every} == {
        f"trap/{geometry.name}/{form}/{name}" for geometry in geometries for form, name in names
    }


def test_smoke_calls_every_entry_and_shows_it_once() -> None:
    for geometry in GEOMETRIES.values():
        cases = gate_cases([geometry], every_trap=True)
        served = {entry.name for entry in entries() if entry.serves(geometry)}
        assert {case.entry for case in cases if not case.id.startswith("serve/")} == served
        shown = [key for key, _ in itertools.groupby((case.id.split("/")[0], case.entry) for case in cases)]
        assert len(set(shown)) == len(shown)


def test_smoke_s_traps_are_of_the_one_table() -> None:
    known = {(case.entry, case.rule, case.variant) for case in trap_cases()}
    assert {
        (case.entry, case.rule, case.variant) for case in smoke_traps(list(GEOMETRIES.values()), once_an_entry=True)
    } <= known
    # One of each rule that a form can break.
    for form, names in SMOKE_NAMES.items():
        rules = {case.rule for case in trap_cases() if case.row.form == form}
        assert {rule for rule, _ in names.values()} == rules - MORE_IN_REJECT[form]


MORE_IN_REJECT = {
    "prefill": {"position_range", "page_origin", "page_coverage"},
    "decode": set[str](),
    "batch_prefill": {"position_range", "page_indptr", "page_origin", "page_coverage", "page_id_range"},
}
"""Rules whose traps in a form smoke leaves to reject: another form's launches have them."""


@pytest.mark.parametrize("case", [smoke_traps([GEOMETRIES["12b-local"]], once_an_entry=True)[0], trap_cases()[0],
                                  reject_cases()[0]], ids=lambda case: case.id)  # fmt: skip
def test_a_case_made_of_functions_reaches_another_process(case: Case) -> None:
    again = pickle.loads(pickle.dumps(case))
    assert (again.id, again.entry, again.geometry) == (case.id, case.entry, case.geometry)
