"""The emulator against outputs that an NVIDIA H200 (driver 580.159.04) produced for the same kernels and inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from launch_helper import float32, int32, pointer, read_as, upload
from nvrtc_helper import DATA, DIALECTS, compile_module

from g4kv_cli.device.emulated import Machine, Module

RECORD: dict[str, npt.NDArray[Any]] = dict(np.load(DATA / "kernels_hw.npz"))
HEAD_DIM = 256


def module(arch: str) -> Module:
    return compile_module((DATA / "kernels.cu").read_text(), arch, "kernels.cu")


def inputs(prefix: str, *names: str) -> list[npt.NDArray[Any]]:
    return [RECORD[f"{prefix}.in.{name}"] for name in names]


# 4 tokens of sequence 0 at positions 0..3 lie in page 2 (pages = [2, 0, 1]), 16 slots of 8 heads a page.
POOL_BEGIN = 2 * 16 * 8 * HEAD_DIM
POOL_END = POOL_BEGIN + 4 * 8 * HEAD_DIM


def run_prep(arch: str, name: str, **options: Any) -> dict[str, npt.NDArray[np.uint16]]:
    """q, and the tokens' rows of the k and v pools; nothing else of the pools was stored."""
    machine = Machine()
    num_q, num_kv, page_size, num_pages, max_pos = (
        int(value) for value in inputs("prep4", "nq", "nkv", "ps", "npg", "mp")
    )
    tokens = RECORD["prep4.in.pos"].size
    bands = num_q + 2 * num_kv
    names = ("qkv", "wq", "wk", "cos", "sin", "pos", "seq", "ptr", "pages")
    addresses = [upload(machine, value, label) for label, value in zip(names, inputs("prep4", *names), strict=True)]
    outputs = {}
    for label in "qkv":
        outputs[label] = machine.allocate(RECORD[f"prep4.hw.{name}.{label}"].nbytes, f"{label} output")
    arguments = [pointer(address) for address in (*addresses, *outputs.values())]
    arguments += [int32(value) for value in (num_q, num_kv, page_size, num_pages, max_pos)] + [float32(1e-6)]
    must_write = [(outputs["q"], RECORD[f"prep4.hw.{name}.q"].nbytes)]
    kernel = module(arch).kernel(name)
    if name == "prep_block":
        machine.launch(kernel, (tokens, bands, 1), (256, 1, 1), arguments, must_write=must_write, **options)
    else:
        blocks = -(-tokens * bands // 4)
        arguments.append(int32(tokens))
        machine.launch(kernel, (blocks, 1, 1), (128, 1, 1), arguments, must_write=must_write, **options)
    for label in "kv":
        assert machine.written_ranges(outputs[label]).tolist() == [[2 * POOL_BEGIN, 2 * POOL_END]]
    values = {
        label: read_as(machine, address, RECORD[f"prep4.hw.{name}.{label}"].size, np.uint16)
        for label, address in outputs.items()
    }
    return {"q": values["q"], "k": values["k"][POOL_BEGIN:POOL_END], "v": values["v"][POOL_BEGIN:POOL_END]}


@pytest.mark.parametrize("arch", DIALECTS)
@pytest.mark.parametrize("name", ["prep_block", "prep_warp"])
def test_prep_equals_h200(arch: str, name: str) -> None:
    got = run_prep(arch, name)
    want = {label: RECORD[f"prep4.hw.{name}.{label}"].reshape(-1) for label in "qkv"}
    np.testing.assert_array_equal(got["q"], want["q"])
    np.testing.assert_array_equal(got["k"], want["k"][POOL_BEGIN:POOL_END])
    np.testing.assert_array_equal(got["v"], want["v"][POOL_BEGIN:POOL_END])


@pytest.mark.parametrize("name", ["prep_block", "prep_warp"])
def test_block_order_and_chunking_do_not_matter(name: str) -> None:
    plain = run_prep("90", name)
    for options in ({"reverse_blocks": True}, {"chunk_threads": 256}, {"chunk_threads": 1 << 20}):
        other = run_prep("90", name, **options)
        for label, values in plain.items():
            np.testing.assert_array_equal(other[label], values)


def run_decode(arch: str, **options: Any) -> dict[str, npt.NDArray[Any]]:
    machine = Machine()
    num_kv, page_size, split_len, splits, batch = (
        int(value) for value in inputs("dec_s", "nkv", "ps", "split", "ns", "B")
    )
    names = ("q", "k", "v", "len", "ptr", "pages")
    addresses = [upload(machine, value, label) for label, value in zip(names, inputs("dec_s", *names), strict=True)]
    sizes = {label: RECORD[f"dec_s.hw.{label}"].nbytes for label in ("part_o", "part_ml", "out")}
    outputs = {label: machine.allocate(nbytes, label) for label, nbytes in sizes.items()}
    kernels = module(arch)
    machine.launch(
        kernels.kernel("decode_split"),
        (splits, num_kv, batch),
        (128, 1, 1),
        [
            *(pointer(address) for address in (*addresses, outputs["part_o"], outputs["part_ml"])),
            *(int32(value) for value in (num_kv, page_size, split_len)),
            float32(RECORD["dec_s.in.sc"]),
        ],
        must_write=[(outputs[label], sizes[label]) for label in ("part_o", "part_ml")],
        **options,
    )
    machine.launch(
        kernels.kernel("decode_merge"),
        (batch * num_kv * 2, 1, 1),
        (256, 1, 1),
        [*(pointer(outputs[label]) for label in ("part_o", "part_ml", "out")), int32(splits)],
        must_write=[(outputs["out"], sizes["out"])],
        **options,
    )
    return {
        label: read_as(machine, address, RECORD[f"dec_s.hw.{label}"].size, RECORD[f"dec_s.hw.{label}"].dtype)
        for label, address in outputs.items()
    }


@pytest.mark.parametrize("arch", DIALECTS)
def test_decode_and_merge_equal_h200(arch: str) -> None:
    for label, values in run_decode(arch).items():
        np.testing.assert_array_equal(values, RECORD[f"dec_s.hw.{label}"].reshape(-1), err_msg=label)


def test_decode_in_reverse_and_in_single_blocks_equals_h200() -> None:
    for options in ({"reverse_blocks": True}, {"chunk_threads": 1}):
        for label, values in run_decode("90", **options).items():
            np.testing.assert_array_equal(values, RECORD[f"dec_s.hw.{label}"].reshape(-1), err_msg=label)


@pytest.mark.parametrize("arch", DIALECTS)
def test_prefill_with_mma_equals_h200(arch: str) -> None:
    machine = Machine()
    q, k, v = inputs("pre_s", "q", "k", "v")
    want = RECORD["pre_s.hw.o"]
    addresses = [upload(machine, value, label) for label, value in (("q", q), ("k", k), ("v", v))]
    output = machine.allocate(want.nbytes, "o")
    machine.launch(
        module(arch).kernel("prefill_mma"),
        (-(-q.shape[0] // 64), q.shape[1], 1),
        (128, 1, 1),
        [
            *(pointer(address) for address in (*addresses, output)),
            *(int32(value) for value in (q.shape[1], k.shape[1], q.shape[0], k.shape[0])),
            float32(RECORD["pre_s.in.sc"]),
        ],
        dynamic_shared_bytes=(64 + 32 + 32) * HEAD_DIM * 2,
        must_write=[(output, want.nbytes)],
    )
    np.testing.assert_array_equal(read_as(machine, output, want.size, np.uint16), want.reshape(-1))
