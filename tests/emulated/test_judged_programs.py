"""Right programs of the judged_ files are not called wrong, and wrong ones are, on both emulators."""

from __future__ import annotations

import numpy as np
import pytest
from judged_atomics import RIGHT_ATOMICS, WRONG_ATOMICS
from judged_copies import WRONG_COPIES
from judged_groups import RIGHT_GROUPS, WRONG_GROUPS
from judged_mbarriers import RIGHT_MBARRIERS, WRONG_MBARRIERS
from judged_programs import WORDS, Program
from judged_right import RIGHT
from judged_waiting import SPINNING
from judged_wrong import WRONG
from launch_helper import int32, launch_on, pointer, read_as, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import Fault, LaunchFault, Machine

JUDGED = [
    *SPINNING,
    *RIGHT,
    *WRONG,
    *RIGHT_GROUPS,
    *WRONG_GROUPS,
    *RIGHT_ATOMICS,
    *WRONG_ATOMICS,
    *WRONG_COPIES,
    *RIGHT_MBARRIERS,
    *WRONG_MBARRIERS,
]


@pytest.fixture(params=["native", "interpreter"])
def emulator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", request.param)


def judge(program: Program) -> tuple[list[Fault], set[str]]:
    """The faults of a program and the kinds of its notes; what a right one computes is compared."""
    machine = Machine()
    values = [np.full(WORDS, -1, np.int32), np.arange(WORDS, dtype=np.int32), np.zeros(WORDS, np.int32)]
    out, source, aux = (upload(machine, value, name) for value, name in zip(values, ("out", "in", "aux"), strict=True))
    if program.out_is_new:
        out = machine.allocate(4 * WORDS, "out")
    kernel = compile_kernel(program.source)
    arguments = (pointer(out), pointer(source), pointer(aux), int32(200))
    try:
        options = {"grid": program.grid, "block": program.block, "cooperative": kernel.synchronises_grid}
        report = launch_on(machine, kernel, *arguments, **options)
    except LaunchFault as error:
        return error.faults, {note.kind for note in error.report.notes}
    if program.want is not None:
        want = program.want(program.grid, program.block)
        np.testing.assert_array_equal(read_as(machine, out, want.size, np.int32), want)
    return [], {note.kind for note in report.notes}


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("program", JUDGED, ids=lambda program: program.name)
def test_a_program_is_judged_rightly(program: Program) -> None:
    faults, notes = judge(program)
    if not program.kinds:
        assert not faults
        assert notes == set(program.notes)
        return
    found = {fault.kind for fault in faults}
    assert found & set(program.kinds)
    assert found - set(program.kinds) == set(program.besides)
    assert any(program.words in fault.message for fault in faults)
