"""Runs CUDA kernels without a GPU from the PTX that NVRTC emits, with all memory and race checks on.

    machine = Machine()
    address = machine.allocate(nbytes, "q_out")
    kernel = Module(ptx_text).kernel("prep")
    report = machine.launch(kernel, grid=(4, 1, 1), block=(128, 1, 1), arguments=[...])

Of Hopper (compute_90a) it knows mbarriers, bulk tensor copies (``Machine.tensor_map``), wgmma and clusters.

A native engine (``engine``) runs what it knows; the interpreter, which is its reference, runs the rest and writes the
reports. ``G4KV_EMULATOR`` is ``native`` (if not set), ``interpreter``, or ``both`` to compare them. A long launch whose
blocks know nothing of each other runs on ``G4KV_EMULATOR_THREADS`` threads of it; if not set, one a core up to 16.

A library of its own: it needs NumPy only. A launch either returns a LaunchReport or raises LaunchFault with one
Fault for each broken rule. Arithmetic is bit-equal to what an NVIDIA H200 was recorded to do; nothing here says
anything about speed or faults of the assembler. What comes before what is said in ``checks/order.py``; threads that
wait for each other take turns (``warp/spins.py``).
"""

from .checks.owned_reads import OwnedReads
from .faults import (
    DeadlinePassed,
    EmulatorError,
    Fault,
    FreedMemory,
    LaunchConfigurationError,
    LaunchFault,
    LaunchInterrupted,
    LaunchReport,
    PoisonedMachine,
    PtxSyntaxError,
    Standing,
    UnsupportedKernel,
    UnsupportedOpcode,
)
from .kernel import Kernel, Module
from .launcher import EmulatorsDiffer, LaunchCounts, emulator_words
from .machine import Machine, cluster_of, grid_of, shared_limit
from .memory.tensor_map import TensorMap

__all__ = [
    "DeadlinePassed",
    "EmulatorError",
    "EmulatorsDiffer",
    "Fault",
    "FreedMemory",
    "Kernel",
    "LaunchConfigurationError",
    "LaunchCounts",
    "LaunchFault",
    "LaunchInterrupted",
    "LaunchReport",
    "Machine",
    "Module",
    "OwnedReads",
    "PoisonedMachine",
    "PtxSyntaxError",
    "Standing",
    "TensorMap",
    "UnsupportedKernel",
    "UnsupportedOpcode",
    "cluster_of",
    "emulator_words",
    "grid_of",
    "shared_limit",
]
