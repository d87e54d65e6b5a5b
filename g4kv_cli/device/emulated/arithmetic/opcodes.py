"""The table of elementwise opcodes: the complete opcode string as PTX writes it, and its exact meaning.

An opcode that is not a key is not known exactly and must not be executed. The table covers what NVRTC emits
for ordinary CUDA C++ in both of its dialects (typed registers up to compute_90, untyped from compute_100 on).
"""

from __future__ import annotations

from .opcodes_compare import comparison_operations
from .opcodes_composed import composed_operations
from .opcodes_convert import conversion_operations
from .opcodes_float import float_operations
from .opcodes_integer import integer_operations
from .opcodes_small_floats import small_float_operations
from .operation import EXPRESSION_NAMES, Op

__all__ = ["ELEMENTWISE", "EXPRESSION_NAMES", "Op"]

_OF_THEIR_OWN: dict[str, Op] = {
    **integer_operations(),
    **comparison_operations(),
    **conversion_operations(),
    **float_operations(),
    **small_float_operations(),
}
ELEMENTWISE: dict[str, Op] = {**_OF_THEIR_OWN, **composed_operations(_OF_THEIR_OWN)}
