"""Python twin of ``struct PrepParams`` (kernels/prep_params.cuh), passed by value as a prep kernel's one parameter."""

from __future__ import annotations

import ctypes

from g4kv_cli.model.kv_layout import KvLayoutParameters


class PrepParameters(ctypes.Structure):
    """Pointers are device addresses; extents as the .cuh states them."""

    _fields_ = (
        ("q", ctypes.c_uint64),
        ("k", ctypes.c_uint64),
        ("v", ctypes.c_uint64),
        ("q_weight", ctypes.c_uint64),
        ("k_weight", ctypes.c_uint64),
        ("cos", ctypes.c_uint64),
        ("sin", ctypes.c_uint64),
        ("q_out", ctypes.c_uint64),
        ("k_out", ctypes.c_uint64),
        ("pool", ctypes.c_uint64),
        ("page_indices", ctypes.c_uint64),
        ("positions", ctypes.c_uint64),
        ("token_requests", ctypes.c_uint64),
        ("page_indptr", ctypes.c_uint64),
        ("page_origins", ctypes.c_uint64),
        ("layout", KvLayoutParameters),
        ("layer", ctypes.c_int32),
        ("num_qo_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("cos_max_pos", ctypes.c_int32),
        ("start_pos", ctypes.c_int32),
        ("page_origin", ctypes.c_int32),
        ("num_pages", ctypes.c_int32),
        ("page_row_len", ctypes.c_int32),
        ("num_requests", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )
