"""Prep of a paged KV cache (norm, RoPE, scatter; head_dim 256) in Numba-CUDA, and the builder that numba.toml names.

    python kernels.py TARGET.ptx '{}'

compiles it for compute capability 9.0, without a GPU, and leaves beside the PTX what a launch has to know. Where Numba
is not installed, what it made before is taken from ``recorded``; ``python kernels.py --record`` makes that anew.

Numba has no bf16 in PTX that it compiles without a device: rows are uint16, widened and rounded by hand. A device
function of one's own asks for a driver even then, so that everything stands inline.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path

RECORDED = Path(__file__).resolve().parent / "recorded" / "prep.ptx"
D, WARPS = 256, 8
PTX_VERSION = "8.3"
"""Numba's own is that of the NVVM at hand, which a driver's compiler may not know yet."""
ARRAYS = dict.fromkeys(("q", "k", "v", "q_weight", "k_weight", "cos", "sin", "q_out", "k_pool", "v_pool"), "u16")
ARRAYS |= {"positions": "i32", "slots": "i64"}
NUMBERS = dict.fromkeys(("heads_q", "heads_kv", "rotary", "page_size"), "i32") | {"eps": "f32"}
NUMBERS |= dict.fromkeys(("stride_page", "stride_slot", "stride_head"), "i64")

try:
    from numba import cuda, float32, int32, int64, uint16, uint32, void
    from numba.cuda import libdevice
except ImportError:
    cuda = None
else:
    as_float, as_bits = libdevice.int_as_float, libdevice.float_as_int


def prep(
    q, k, v, q_weight, k_weight, cos, sin, q_out, k_pool, v_pool, positions, slots,
    heads_q, heads_kv, rotary, page_size, eps, stride_page, stride_slot, stride_head,
):  # fmt: skip
    """One block a (token, head row): rows of Q, then K, then V; a thread a column."""
    token, band, d = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    sums = cuda.shared.array(WARPS, float32)
    row = cuda.shared.array(D, float32)
    is_q, is_k = band < heads_q, band >= heads_q and band < heads_q + heads_kv
    head = band if is_q else (band - heads_q) % heads_kv
    heads = heads_q if is_q else heads_kv
    at = (int64(token) * heads + head) * D + d
    raw = q[at] if is_q else (k[at] if is_k else v[at])
    x = as_float(int32(uint32(raw) << uint32(16)))
    total = x * x
    for step in (16, 8, 4, 2, 1):
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
    if d % 32 == 0:
        sums[d // 32] = total
    cuda.syncthreads()
    square = float32(0.0)
    for warp in range(WARPS):
        square += sums[warp]
    value = x * (float32(1.0) / math.sqrt(square / float32(D) + eps))
    if is_q or is_k:
        weight = q_weight[d] if is_q else k_weight[d]
        row[d] = value * as_float(int32(uint32(weight) << uint32(16)))
    cuda.syncthreads()
    if is_q or is_k:
        value = row[d]
        if d < rotary:
            half = rotary // 2
            line = int64(positions[token]) * rotary + d
            c, s = as_float(int32(uint32(cos[line]) << uint32(16))), as_float(int32(uint32(sin[line]) << uint32(16)))
            value = row[d] * c - row[d + half] * s if d < half else row[d] * c + row[d - half] * s
    bits = uint32(as_bits(float32(value)))
    rounded = uint16((bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16))
    if is_q:
        q_out[at] = rounded
    else:
        # pool[page][..][slot][head][dim]
        slot = slots[token]
        place = slot // page_size * stride_page + slot % page_size * stride_slot + head * stride_head + d
        if is_k:
            k_pool[place] = rounded
        else:
            v_pool[place] = rounded


def compiled() -> tuple[str, dict[str, object]]:
    """PTX, and what a launch has to know: a one-dimensional array is seven parameters (meminfo, parent, items, bytes of
    an item, data, extent, stride)."""
    kinds = {"u16": uint16, "i32": int32, "i64": int64, "f32": float32}
    arrays = [kinds[kind][::1] for kind in ARRAYS.values()]
    signature = void(*arrays, *(kinds[kind] for kind in NUMBERS.values()))
    ptx, _ = cuda.compile_ptx(prep, signature, device=False, cc=(9, 0))
    ptx = re.sub(r"(?m)^//.*\n|^\.common .*\n", "", ptx)
    ptx = re.sub(r"(?m)^\.version .*", f".version {PTX_VERSION}", ptx)
    (mangled,) = re.findall(r"\.entry (\w+)", ptx)
    ptx = ptx.replace(mangled, "prep")
    names: list[str] = []
    for name, kind in ARRAYS.items():
        nbytes = f"bytes{int(kind[1:]) // 8}"
        names += ["null", "null", "items", nbytes, name, "items", nbytes]
    return ptx, {"threads": D, "shared": 0, "arguments": [*names, *NUMBERS]}


def build(target: Path) -> None:
    """Leave PTX at ``target`` and facts beside it; those that are recorded where Numba is not."""
    if cuda is not None and "--recorded" not in sys.argv:
        ptx, facts = compiled()
        target.write_text(ptx)
        target.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
        return
    shutil.copy(RECORDED.with_suffix(".json"), target.with_suffix(".json"))
    shutil.copy(RECORDED, target)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--recorded"]
    if words == ["--record"] and cuda is None:
        raise SystemExit("Numba is not installed: pip install numba-cuda")
    build(RECORDED if words == ["--record"] else Path(words[0]))
