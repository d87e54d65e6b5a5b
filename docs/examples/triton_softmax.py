"""A Triton kernel on the emulated device, from the PTX that Triton made of it: no GPU and no Triton needed.

Run it: python docs/examples/triton_softmax.py; --compile, where Triton is installed, compiles the kernel below anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from g4kv_cli import emulator

RECORDED = Path(__file__).with_suffix(".ptx")
"""Triton 3.9 for compute capability 9.0, BLOCK = 256, four warps; without its debug sections."""
WARPS, SHARED_BYTES = 4, 16
"""What Triton says of the kernel: ``metadata.num_warps`` and ``metadata.shared``."""

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def softmax_rows(x, out, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    values = tl.load(x + row * stride + column, mask=inside, other=float("-inf"))
    values = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * stride + column, values / tl.sum(values, axis=0), mask=inside)
"""


def compile_ptx(directory: Path) -> str:
    """The kernel's PTX from the Triton that is installed; it needs no GPU, and no driver."""
    import importlib

    (directory / "softmax_kernel.py").write_text(KERNEL.lstrip())
    sys.path.insert(0, str(directory))
    kernel = importlib.import_module("softmax_kernel").softmax_rows
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {"x": "*fp32", "out": "*fp32", "stride": "i32", "columns": "i32", "BLOCK": "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs={"BLOCK": 256})
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
    return str(made.asm["ptx"])


def main(ptx: str) -> None:
    """Softmax of ragged rows, against NumPy."""
    rows, columns = 6, 200
    x = np.random.default_rng(seed=1).standard_normal((rows, columns)).astype(np.float32)
    out = np.zeros_like(x)
    # Triton's kernels take two more pointers, to scratch memory, which this one does not use.
    arguments = [x, emulator.out(out), columns, columns, None, None]
    module = emulator.load(ptx)
    print(module.launch("softmax_rows", rows, 32 * WARPS, arguments, shared=SHARED_BYTES))

    want = np.exp(x - x.max(axis=1, keepdims=True, initial=-np.inf).astype(np.float64))
    want /= want.sum(axis=1, keepdims=True)
    print(f"largest relative error: {(np.abs(out - want) / want).max():.2g}")


if __name__ == "__main__":
    if "--compile" in sys.argv[1:]:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            main(compile_ptx(Path(folder)))
    else:
        main(RECORDED.read_text())
