"""Triton kernels for a paged KV cache, and the builder that triton.toml names: prep (norm, RoPE, scatter) and decode.

    python kernels.py KERNEL TARGET.ptx '{"D": 256, ...}'

compiles one of them for compute capability 9.0, without a GPU, and leaves beside the PTX what a launch has to know.
Where Triton is not installed, what it made before is taken from ``recorded``; ``python kernels.py --record`` makes that
anew.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

RECORDED = Path(__file__).resolve().parent / "recorded"
RECORDED_CONSTANTS = {
    "prep": [{"D": 256, "K_IS_V": 0}, {"D": 512, "K_IS_V": 1}],
    "decode": [{"D": 256, "GROUP": 2}, {"D": 512, "GROUP": 16}],
}
POINTERS = {
    "prep": ("q", "k", "v", "q_weight", "k_weight", "cos", "sin", "q_out", "k_pool", "v_pool"),
    "decode": ("q", "k_pool", "v_pool", "out"),
}
"""To bf16; the types of all other arguments follow from their names."""
TYPES = {
    "lse": "*fp32", "positions": "*i32", "slots": "*i64", "table": "*i32", "kv_lens": "*i32", "origins": "*i32",
    "eps": "fp32", "scale_log2": "fp32", "stride_page": "i64", "stride_slot": "i64", "stride_head": "i64",
}  # fmt: skip

PTX_VERSION = 83
"""Triton's own is that of the assembler it brings, which a driver's compiler may not know yet."""

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
else:

    @triton.jit
    def rotated(row, weight, d, pair, turns, sign, c, s, eps, D: tl.constexpr, WEIGHTED: tl.constexpr):
        """A row over its root mean square (times the weight), and turned by the position's angles."""
        x = tl.load(row + d).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
        if not WEIGHTED:
            return x * scale
        a = x * scale * tl.load(weight + d).to(tl.float32)
        b = tl.load(row + pair).to(tl.float32) * scale * tl.load(weight + pair).to(tl.float32)
        return tl.where(turns, a * c + sign * b * s, a)

    @triton.jit
    def prep(
        q, k, v, q_weight, k_weight, cos, sin, q_out, k_pool, v_pool, positions, slots, heads_q, heads_kv, rotary, eps,
        stride_page, stride_slot, stride_head, page_size, D: tl.constexpr, K_IS_V: tl.constexpr,
    ):  # fmt: skip
        """A program a (token, head row): rows of Q, then K, then V. ``slots``: page * page_size + slot of the token."""
        token, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
        d = tl.arange(0, D)
        turns = d < rotary
        pair = tl.where(d < rotary // 2, d + rotary // 2, tl.where(turns, d - rotary // 2, d))
        sign = tl.where(d < rotary // 2, -1.0, 1.0)
        # cos[position][dim], sin likewise
        angles = tl.load(positions + token).to(tl.int64) * rotary + d
        c = tl.load(cos + angles, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + angles, mask=turns, other=0.0).to(tl.float32)
        # pool[page][..][slot][head][dim], in whatever order the strides say
        slot = tl.load(slots + token)
        place = (slot // page_size) * stride_page + (slot % page_size) * stride_slot + d
        if row < heads_q:
            # q[token][head][dim]
            at = (token * heads_q + row) * D
            out = rotated(q + at, q_weight, d, pair, turns, sign, c, s, eps, D, True)
            tl.store(q_out + at + d, out.to(tl.bfloat16))
        elif row < heads_q + heads_kv:
            head = row - heads_q
            source = k + (token * heads_kv + head) * D
            out = rotated(source, k_weight, d, pair, turns, sign, c, s, eps, D, True)
            tl.store(k_pool + place + head * stride_head, out.to(tl.bfloat16))
            if K_IS_V:
                out = rotated(source, k_weight, d, pair, turns, sign, c, s, eps, D, False)
                tl.store(v_pool + place + head * stride_head, out.to(tl.bfloat16))
        else:
            head = row - heads_q - heads_kv
            source = v + (token * heads_kv + head) * D
            out = rotated(source, k_weight, d, pair, turns, sign, c, s, eps, D, False)
            tl.store(v_pool + place + head * stride_head, out.to(tl.bfloat16))

    @triton.jit
    def decode(
        q, k_pool, v_pool, out, lse, table, kv_lens, origins, heads_q, scale_log2, window_left, table_width, page_size,
        stride_page, stride_slot, stride_head, D: tl.constexpr, GROUP: tl.constexpr,
    ):  # fmt: skip
        """A program a (request, KV head). ``table`` [requests, table_width]: a request's pages from ``origins`` on."""
        ROWS: tl.constexpr = 16  # of tl.dot's tiles; rows of no head are masked
        KEYS: tl.constexpr = 32
        request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        d, r, n = tl.arange(0, D), tl.arange(0, ROWS), tl.arange(0, KEYS)
        kv_len = tl.load(kv_lens + request)
        first = tl.load(origins + request) * page_size
        begin = first
        if window_left >= 0:
            begin = tl.maximum(kv_len - 1 - window_left, first)
        is_row = r < GROUP
        # q[request][head][dim]
        rows = request * heads_q + head * GROUP + r
        q_rows = tl.load(q + rows[:, None] * D + d[None, :], mask=is_row[:, None], other=0.0)
        most = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        values_sum = tl.zeros([ROWS, D], tl.float32)
        for start in range(begin, kv_len, KEYS):
            key = start + n
            seen = key < kv_len
            index = tl.where(seen, key - first, 0)
            page = tl.load(table + request * table_width + index // page_size, mask=seen, other=0).to(tl.int64)
            # pool[page][..][slot][head][dim]
            place = page * stride_page + (index % page_size).to(tl.int64) * stride_slot + head * stride_head
            keys = tl.load(k_pool + place[None, :] + d[:, None], mask=seen[None, :], other=0.0)
            scores = tl.where(seen[None, :], tl.dot(q_rows, keys) * scale_log2, -float("inf"))
            above = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp2(scores - above[:, None])
            kept = tl.exp2(most - above)
            values = tl.load(v_pool + place[:, None] + d[None, :], mask=seen[:, None], other=0.0)
            total = total * kept + tl.sum(weights, 1)
            values_sum = values_sum * kept[:, None] + tl.dot(weights.to(tl.bfloat16), values)
            most = above
        result = (values_sum / total[:, None]).to(tl.bfloat16)
        tl.store(out + rows[:, None] * D + d[None, :], result, mask=is_row[:, None])
        tl.store(lse + rows, (most + tl.log2(total)) * 0.6931471805599453, mask=is_row)


def compiled(kernel: str, constants: dict[str, int]) -> tuple[str, dict[str, object]]:
    """(PTX, facts) of a kernel from the Triton that is installed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = {"prep": prep, "decode": decode}[kernel]
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else _type_of(kernel, name) for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    # As Triton's own launcher finds it in every call: rows and strides are whole 16 bytes.
    aligned = [at for at, name in enumerate(names) if signature[name] in ("*bf16", "i64")]
    attributes = {(at,): [["tt.divisibility", 16]] for at in aligned}
    source = ASTSource(function, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": 4, "enable_fp_fusion": True, "ptx_version": PTX_VERSION}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    if made.metadata.global_scratch_size:
        raise SystemExit(f"{kernel} needs scratch memory, which triton.toml does not give it")
    facts = {
        "symbol": made.metadata.name,
        "threads": 32 * made.metadata.num_warps,
        "shared": made.metadata.shared,
        "arguments": [name for name in names if name not in constants],
        "null_pointers": 2,  # Triton's own: scratch memory, and a profiler's
    }
    # Without debug sections and what refers to them, and without the folders of this machine.
    ptx = re.sub(r", function_name [^\n]*", "", made.asm["ptx"].partition("\t.section")[0])
    return re.sub(r'"/[^"]*/', '"', ptx), facts


def _type_of(kernel: str, name: str) -> str:
    return "*bf16" if name in POINTERS[kernel] else TYPES.get(name, "i32")


def stem_of(kernel: str, constants: dict[str, int]) -> str:
    """The name under which a kernel is recorded: ``decode_D256_GROUP2``."""
    return "_".join([kernel, *(f"{name}{value}" for name, value in sorted(constants.items()))])


def build(kernel: str, target: Path, constants: dict[str, int], *, recorded: bool = False) -> None:
    """Leave PTX at ``target`` and facts beside it; those that are recorded, if asked for or where Triton is not."""
    if triton is not None and not recorded:
        ptx, facts = compiled(kernel, constants)
        target.write_text(ptx)
        target.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
        return
    source = RECORDED / f"{stem_of(kernel, constants)}.ptx"
    if not source.is_file():
        raise SystemExit(f"{source.name} is not among what is recorded; pip install triton compiles it")
    shutil.copy(source.with_suffix(".json"), target.with_suffix(".json"))
    shutil.copy(source, target)


def record() -> None:
    """Compile what is recorded anew."""
    if triton is None:
        raise SystemExit("Triton is not installed: pip install triton")
    for kernel, variants in RECORDED_CONSTANTS.items():
        for constants in variants:
            build(kernel, RECORDED / f"{stem_of(kernel, constants)}.ptx", constants)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--recorded"]
    if words == ["--record"]:
        record()
    else:
        build(words[0], Path(words[1]), json.loads(words[2]), recorded="--recorded" in sys.argv)
