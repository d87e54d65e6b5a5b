"""A pytest fixture. In a ``conftest.py``: ``pytest_plugins = ["g4kv_cli.emulator.fixture"]``.

def test_sum(emulated_device):
    module = emulated_device.load("sum.cu")
    ...
"""

from __future__ import annotations

import pytest

from g4kv_cli.emulator.device import Emulator


@pytest.fixture
def emulated_device() -> Emulator:
    """An emulated device of the test's own; a finding of a launch fails the test."""
    return Emulator()
