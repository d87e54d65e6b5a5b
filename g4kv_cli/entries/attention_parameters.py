"""Python twin of ``struct AttentionParams`` (kernels/attention_params.cuh), every attention kernel's one parameter."""

from __future__ import annotations

import ctypes

from g4kv_cli.model.kv_layout import KvLayoutParameters


class AttentionParameters(ctypes.Structure):
    """Pointers are device addresses, 0 for null; extents as the .cuh states them."""

    _fields_ = (
        ("q", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("lse", ctypes.c_uint64),
        ("pool", ctypes.c_uint64),
        ("page_indices", ctypes.c_uint64),
        ("page_indptr", ctypes.c_uint64),
        ("page_origins", ctypes.c_uint64),
        ("kv_lens", ctypes.c_uint64),
        ("q_indptr", ctypes.c_uint64),
        ("tile_requests", ctypes.c_uint64),
        ("tile_indices", ctypes.c_uint64),
        ("partial_out", ctypes.c_uint64),
        ("partial_max", ctypes.c_uint64),
        ("partial_sum", ctypes.c_uint64),
        ("layout", KvLayoutParameters),
        ("layer", ctypes.c_int32),
        ("num_qo_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("num_tiles", ctypes.c_int32),
        ("num_splits", ctypes.c_int32),
        ("window_left", ctypes.c_int32),
        ("scale_log2", ctypes.c_float),
        ("overlaps", ctypes.c_int32),
    )
