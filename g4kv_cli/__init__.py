"""g4kv: verify and measure the CUDA kernels that write and read Gemma 4's two-family paged KV cache."""

__version__ = "0.1.0"
