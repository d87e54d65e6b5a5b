"""The contract's rules: a registry of everything that a request is checked for before a launch.

A rule has a stable code; ``require`` is the only place that raises. A rule that one module checks is declared there,
beside its arithmetic; those that several check stand below. The reject catalogue (cases/reject) proves that each of
them rejects and lets pass: a new rule is one declaration with its check, and a case.
"""

from __future__ import annotations

from g4kv_cli.records.rules import LAUNCH_RULES, RULES, Rule, launch_rule, rule, shown

__all__ = ["LAUNCH_RULES", "RULES", "Rule", "launch_rule", "rule", "shown"]

# Checked in several modules
FITS_I32 = rule("fits_i32", "does not fit the 32-bit integer the kernel indexes with")
EXTENT_POSITIVE = rule("extent_positive", "must be at least 1")
DTYPE = rule("dtype", "has the wrong element type")
SHAPE = rule("shape", "has the wrong shape")
HEAD_DIM = rule("head_dim", "is not a head_dim that the kernels at hand are compiled for")
Q_HEADS_MULTIPLE = rule("q_heads_multiple", "is not a positive multiple of the KV heads")
LAYER_RANGE = rule("layer_range", "is outside the pool's layers")
START_POS = rule("start_pos", "must not be negative")
POSITION_RANGE = rule("position_range", "is outside the RoPE tables")
HOST_COPY = rule("host_copy", "is not the int32 copy, of the same length, of the array on the device")
PAGE_ORIGIN = rule("page_origin", "must not be negative or past the page of the first position")
PAGE_COVERAGE = rule("page_coverage", "does not reach the page of every position")
PAGE_ID_RANGE = rule("page_id_range", "names a page that the pool does not have")
LAST_PAGE_LEN = rule("last_page_len", "must be at least 1 and at most page_size")
