"""C++ symbols in words; what c++filt says of the same symbols was read off once."""

from __future__ import annotations

import pytest

from g4kv_cli.emulator.mangled import read_symbol, variable_name


@pytest.mark.parametrize(
    ("symbol", "words"),
    [
        ("_Z3addPfS_i", "add(float*, float*, int)"),
        ("_Z3addPKfS0_Pfi", "add(const float*, const float*, float*, int)"),
        ("_Z3addIfEvPT_S0_i", "add<float>(float*, float, int)"),
        ("_Z4sortIiLb1EEvPKT_PS0_j", "sort<int, true>(const int*, int*, unsigned int)"),
        ("_ZN2ns3addIfLi4EEEvPT_i", "ns::add<float, 4>(float*, int)"),
        ("_ZN2ns1kEPNS_1TES1_", "ns::k(ns::T*, ns::T*)"),
        ("_Z1kI6vectorIfEEvT_PS2_", "k<vector<float>>(vector<float>, vector<float>*)"),
        ("_Z5plainPKf1P13__nv_bfloat16hbxds", "plain(const float*, P, __nv_bfloat16, unsigned char, bool, long long, "
         "double, short)"),
        ("_ZN12_GLOBAL__N_13fooEPi", "(anonymous)::foo(int*)"),
        ("_ZL6hiddenPf", "hidden(float*)"),
        ("_Z1kv", "k()"),
    ],
)  # fmt: skip
def test_a_symbol_is_read(symbol: str, words: str) -> None:
    assert str(read_symbol(symbol)) == words


@pytest.mark.parametrize(
    "symbol", ["cfun", "_Z1fPFvvE", "_Z", "_Z9short", "_Z1kPS9_", "_ZN2ns", "_Z1kILiE", "_Z1kT_", "_Z1kSt6vector"]
)
def test_what_is_not_understood_is_none(symbol: str) -> None:
    assert read_symbol(symbol) is None


def test_variables_have_names_too() -> None:
    assert variable_name("_ZN2ns7counterE") == "ns::counter"
    assert variable_name("coefficients") == "coefficients"
