"""C functions of an engine: arguments by type, structs by value, memory of the host, and what says that one refused."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from g4kv_cli.errors import CompileError
from g4kv_cli.providers.c_function import Returned, call, function_of, last_error_of
from g4kv_cli.providers.expression import Expression, ExpressionError
from g4kv_cli.providers.manifest import ArgumentSpec, MadeArray
from g4kv_cli.providers.packing import c_argument, values_of

SCOPE = {"n": 3, "scale": 0.5, "lens": np.array([5, 7])}
ADDRESSES = {**SCOPE, "q": 0x7000, "pool": 0x9000}


def _argument(kind: str, text: str) -> ArgumentSpec:
    return ArgumentSpec(kind, Expression.parse(text))  # type: ignore[arg-type]


def test_a_function_gets_its_arguments_by_type() -> None:
    got: list[Any] = []
    kinds = (ctypes.c_void_p, ctypes.c_int8, ctypes.c_uint64, ctypes.c_float, ctypes.c_double, ctypes.c_bool)
    function = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(lambda *given: got.extend(given) or 0)
    specs = [("ptr", "q + 16"), ("i8", "-n"), ("u64", "1 << 62"), ("f32", "scale"), ("f64", "scale / n")]
    specs.append(("bool", "n > 2"))
    given = [c_argument(_argument(kind, text), SCOPE, ADDRESSES) for kind, text in specs]
    assert call(function, given, "int", ctypes.CDLL(None)) == Returned("")
    assert got == [0x7010, -3, 1 << 62, 0.5, 0.5 / 3, True]


def test_a_struct_goes_by_value_with_its_alignment() -> None:
    last = (_argument("f32", "scale"), _argument("bool", "n < 2"))
    fields = (_argument("i8", "n"), _argument("ptr", "q"), ArgumentSpec("struct", fields=last))
    made = c_argument(ArgumentSpec("struct", fields=fields), SCOPE, ADDRESSES)
    assert isinstance(made, ctypes.Structure)
    assert ctypes.sizeof(made) == 24
    assert (made.field0, made.field1, made.field2.field0) == (3, 0x7000, 0.5)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "text"), [("u8", "256"), ("i32", "-(1 << 40)"), ("u64", "-1")])
def test_a_number_that_does_not_fit_is_refused(kind: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"is no {kind}"):
        c_argument(_argument(kind, text), SCOPE, ADDRESSES)


@pytest.mark.parametrize(
    ("returns", "kind", "value", "says"),
    [
        ("int", ctypes.c_int, 0, ""), ("int", ctypes.c_int, -3, "returned -3"),
        ("bool", ctypes.c_bool, True, ""), ("bool", ctypes.c_bool, False, "returned False"),
    ],
)  # fmt: skip
def test_a_status_says_whether_it_refused(returns: Any, kind: Any, value: Any, says: str) -> None:
    assert call(ctypes.CFUNCTYPE(kind)(lambda: value), [], returns, ctypes.CDLL(None)) == Returned(says)


def test_a_value_is_given_on_and_a_null_handle_refuses() -> None:
    library: Any = SimpleNamespace()
    for returns, kind, value in (("ptr", ctypes.c_void_p, 0x7000), ("i64", ctypes.c_int64, -(1 << 40))):
        assert call(ctypes.CFUNCTYPE(kind)(lambda value=value: value), [], returns, library) == Returned("", value)
    assert call(ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: 0), [], "ptr", library).refusal == "returned null"
    text = ctypes.create_string_buffer(b"out of memory")
    words = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(lambda _: ctypes.addressof(text))
    errors = [0, 2]
    failing: Any = SimpleNamespace(cudaGetLastError=lambda: errors.pop(0), cudaGetErrorString=words)
    refusal = call(ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: 0), [], "ptr", failing).refusal
    assert refusal == "returned null and left the runtime's error 2 (out of memory)"


def test_the_runtime_is_asked_behind_a_function_without_a_result() -> None:
    """Its last error is of this call: what was there before is taken away first."""
    errors, text = [98], ctypes.create_string_buffer(b"invalid device function")
    # A callback gives the address: of bytes that it returned itself, ctypes would never let go.
    words = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int)({98: ctypes.addressof(text)}.get)
    library: Any = SimpleNamespace(cudaGetLastError=lambda: errors.pop() if errors else 0, cudaGetErrorString=words)
    launch = ctypes.CFUNCTYPE(None)
    assert call(launch(lambda: None), [], "void", library).refusal == ""
    says = call(launch(lambda: errors.append(98)), [], "void", library).refusal
    assert says == "left the runtime's error 98 (invalid device function)"
    fails = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: errors.append(98) or 1)
    errors.append(98)
    assert call(fails, [], "int", library).refusal == f"returned 1 and {says}"
    without: Any = SimpleNamespace()
    assert call(launch(lambda: None), [], "void", without).refusal == "", "a library that shows no runtime is not asked"


def test_a_function_that_is_not_there() -> None:
    with pytest.raises(CompileError, match="has no function 'no_such_function': nm -D"):
        function_of(ctypes.CDLL(None), "libengine.so", "no_such_function")
    assert (
        last_error_of(ctypes.CDLL(None), "no_such_function")
        == " (and it has no function 'no_such_function' to ask why)"
    )


def test_arrays_of_addresses_and_structs_in_memory() -> None:
    addresses = values_of(MadeArray("blocks", "ptr", Expression.parse("pool + 2 * lens")), SCOPE, ADDRESSES)
    assert (addresses.dtype, addresses.tolist()) == (np.uint64, [0x900A, 0x900E])
    fields = (_argument("u16", "n"), _argument("ptr", "q"))
    raw = values_of(MadeArray("params", "struct", Expression.parse("0"), fields), SCOPE, ADDRESSES)
    assert raw.tobytes() == bytes([3, *[0] * 7, 0, 0x70, *[0] * 6])
    text = values_of(MadeArray("dtype", "u8", Expression.parse("'bf16' if n == 3 else 'half'")), SCOPE, ADDRESSES)
    assert text.tobytes() == b"bf16\0"
    with pytest.raises(ExpressionError, match="dtype: a text goes as u8, not as i32"):
        values_of(MadeArray("dtype", "i32", Expression.parse("'bf16'")), SCOPE, ADDRESSES)
    with pytest.raises(ExpressionError, match="no name 'pool' here"):
        values_of(MadeArray("numbers", "i64", Expression.parse("pool + 1")), SCOPE, ADDRESSES)
