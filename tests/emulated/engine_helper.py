"""Runs handlers of the native engine alone, and says plainly what to do where there is no engine."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from g4kv_cli.device.emulated.engine.handlers import HANDLERS
from g4kv_cli.device.emulated.engine.library import Library, library, missing_reason
from g4kv_cli.device.emulated.engine.operations import SLOT_BYTES, SLOT_KIND
from g4kv_cli.device.emulated.engine.state import EngineState
from g4kv_cli.device.emulated.engine.structures import INSTRUCTION, LANES

Array = npt.NDArray[Any]
DTYPES = {"b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "pred": np.bool_}
SLOT_DTYPES = {"b32": np.uint32, "b64": np.uint64}
PLACE_BYTES = 256


def engine() -> Library:
    """The engine; a test that needs one fails without it."""
    found = library()
    if found is None:
        pytest.fail(f"no native engine: {missing_reason()}")
    return found


@cache
def _state() -> EngineState:
    state = EngineState()
    state.set_logs(1)
    return state


def execute(handlers: tuple[str, ...], kinds: tuple[str, ...], result: str, operands: list[Array]) -> Array:
    """Results of handlers, one after another, for operands of raw bits (kinds as in the table of opcodes)."""
    count = max(operand.size for operand in operands)
    warps = -(-count // LANES)
    padded = [np.resize(np.broadcast_to(operand, (count,)), warps * LANES) for operand in operands]
    frame = np.zeros((len(operands) + 2) * PLACE_BYTES, np.uint8)
    code = np.zeros(len(handlers) + 1, INSTRUCTION)
    for number, handler in enumerate(handlers):
        code[number]["run"] = engine().handler(handler)
        sources = [PLACE_BYTES * (1 + place) for place in range(len(operands))] if number == 0 else [0]
        code[number]["field"][: len(sources) + 1] = [0, *sources]
    state = _state()
    results = np.empty(warps * LANES, DTYPES[result])
    for warp in range(warps):
        part = slice(warp * LANES, (warp + 1) * LANES)
        for place, (values, kind) in enumerate(zip(padded, kinds, strict=True)):
            write_slot(frame, PLACE_BYTES * (1 + place), values[part], kind)
        engine().execute(ctypes.addressof(state.launch), code.ctypes.data, frame.ctypes.data, 0xFFFFFFFF)
        results[part] = read_slot(frame, 0, result)
    return results[:count]


def write_slot(frame: Array, at: int, values: Array, kind: str) -> None:
    """Put a value for each lane into a frame."""
    if kind == "pred":
        frame[at : at + 4] = np.packbits(values.astype(np.bool_), bitorder="little")
    else:
        slot = SLOT_KIND[kind]
        frame[at : at + SLOT_BYTES[slot]].view(SLOT_DTYPES[slot])[:] = values


def read_slot(frame: Array, at: int, kind: str) -> Array:
    """The values of all lanes."""
    if kind == "pred":
        return np.unpackbits(frame[at : at + 4], bitorder="little").astype(np.bool_)
    slot = SLOT_KIND[kind]
    return frame[at : at + SLOT_BYTES[slot]].view(SLOT_DTYPES[slot]).astype(DTYPES[kind])


def execute_opcode(opcode: str, kinds: tuple[str, ...], result: str, operands: list[Array]) -> Array:
    """The engine's result of an elementwise opcode."""
    return execute(HANDLERS[opcode], kinds, result, operands)
