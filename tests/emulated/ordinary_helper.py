"""Ordinary CUDA programs (tests/data/ordinary): compiled as a project would, and launched with arrays and numbers."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from nvrtc_helper import compile_module

from g4kv_cli.compiler.toolkit import include_directories
from g4kv_cli.device.emulated import LaunchReport, Machine, Module

ORDINARY = Path(__file__).resolve().parent.parent / "data" / "ordinary"
ARCHS = ("90", "120")
"""NVRTC's two dialects."""


@cache
def ordinary(stem: str, arch: str) -> Module:
    """The module of one source of the pack, with the compiler's default contraction."""
    path = ORDINARY / f"{stem}.cu"
    includes = [f"-I{directory}" for directory in include_directories()]
    return compile_module(path.read_text(), arch, path.name, "--std=c++17", *includes)


class Program:
    """One kernel of the pack on a fresh machine. ``outputs`` starts as the arrays that were passed."""

    def __init__(self, stem: str, name: str, arch: str = "90") -> None:
        self.kernel = ordinary(stem, arch).kernel(name)
        self.machine = Machine()
        self.report: LaunchReport | None = None

    def run(self, *arguments: Any, grid: int = 1, block: int = 32) -> list[npt.NDArray[Any]]:
        """Launch; the arrays among the arguments as they are afterwards."""
        packed: list[bytes] = []
        arrays: list[tuple[int, npt.NDArray[Any]]] = []
        for number, argument in enumerate(arguments):
            if isinstance(argument, np.ndarray):
                address = self.machine.allocate(argument.nbytes, f"argument {number}")
                self.machine.write(address, argument)
                arrays.append((address, argument))
                packed.append(struct.pack("<Q", address))
            else:
                packed.append(struct.pack("<f" if isinstance(argument, float) else "<i", argument))
        together = self.kernel.synchronises_grid
        self.report = self.machine.launch(self.kernel, (grid, 1, 1), (block, 1, 1), packed, cooperative=together)
        return [
            self.machine.read(address, array.nbytes).view(array.dtype).reshape(array.shape) for address, array in arrays
        ]


def run(stem: str, name: str, arch: str, *arguments: Any, grid: int = 1, block: int = 32) -> list[npt.NDArray[Any]]:
    """The arrays among the arguments after one launch of a kernel of the pack."""
    return Program(stem, name, arch).run(*arguments, grid=grid, block=block)
