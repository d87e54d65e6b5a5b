"""Runs CUDA kernels without a GPU by interpreting the PTX that NVRTC emits, with all memory and race checks on.

    machine = Machine()
    address = machine.allocate(nbytes, "q_out")
    kernel = Module(ptx_text).kernel("prep")
    report = machine.launch(kernel, grid=(4, 1, 1), block=(128, 1, 1), arguments=[...])

Of Hopper (compute_90a) it knows mbarriers, bulk tensor copies (``Machine.tensor_map``) and wgmma.

A library of its own: it needs NumPy only. A launch either returns a LaunchReport or raises LaunchFault with one
Fault for each broken rule. Arithmetic is bit-equal to what an NVIDIA H200 was recorded to do; nothing here says
anything about speed, occupancy, memory ordering or faults of the assembler.
"""

from .faults import (
    DeadlinePassed,
    EmulatorError,
    Fault,
    LaunchConfigurationError,
    LaunchFault,
    LaunchInterrupted,
    LaunchReport,
    PoisonedMachine,
    PtxSyntaxError,
    Standing,
    UnsupportedOpcode,
)
from .interpreter.translate import Kernel, Module
from .machine import Machine, shared_limit
from .memory.tensor_map import TensorMap

__all__ = [
    "DeadlinePassed",
    "EmulatorError",
    "Fault",
    "Kernel",
    "LaunchConfigurationError",
    "LaunchFault",
    "LaunchInterrupted",
    "LaunchReport",
    "Machine",
    "Module",
    "PoisonedMachine",
    "PtxSyntaxError",
    "Standing",
    "TensorMap",
    "UnsupportedOpcode",
    "shared_limit",
]
