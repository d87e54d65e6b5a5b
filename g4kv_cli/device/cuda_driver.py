"""The CUDA driver's view of the machine, and its errors in our words. Imports cuda.core only when called."""

from __future__ import annotations

from typing import Any

from g4kv_cli.errors import DeviceFault, DeviceUnavailable, G4kvError

MINIMUM_COMPUTE_CAPABILITY = (8, 0)  # bf16 arithmetic and cp.async

# Errors that leave the context unusable, with the stable name of the fault. A device __trap() is reported as
# LAUNCH_FAILED or, where the driver can tell, as ILLEGAL_INSTRUCTION.
FAULT_KINDS = {
    "CUDA_ERROR_LAUNCH_FAILED": "trap",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "trap",
    "CUDA_ERROR_ASSERT": "trap",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "illegal_address",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": "illegal_address",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "misaligned_address",
    "CUDA_ERROR_INVALID_PC": "invalid_pc",
    "CUDA_ERROR_HARDWARE_STACK_ERROR": "stack_error",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "timeout",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK": "tensor_memory_leak",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "hardware",
    "CUDA_ERROR_CONTAINED": "hardware",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "context_destroyed",
}


def count_gpus() -> int:
    """How many GPUs the driver shows. Raises DeviceUnavailable, with the real reason, if there is none."""
    try:
        from cuda.core import Device as CoreDevice
    except ImportError as error:
        raise DeviceUnavailable(
            f"cuda.core cannot be imported: {first_line(error)}; install it with: "
            "python -m pip install 'cuda-core>=1,<2' 'cuda-python>=13,<14'"
        ) from error
    try:
        count = len(CoreDevice.get_all_devices())
    except Exception as error:  # cuda.core and its loader raise types of their own that differ between versions
        if type(error).__name__ == "DynamicLibNotFoundError":
            raise DeviceUnavailable("no CUDA driver: libcuda is not installed") from error
        raise DeviceUnavailable(f"no CUDA driver: {first_line(error)}") from error
    if count == 0:
        raise DeviceUnavailable("the CUDA driver shows no GPU")
    return count


def arch_of(major: int, minor: int) -> str:
    """The arch to compile for: with the chip's own instructions (``a``) on capability 9.x and 10.x."""
    return f"sm_{major}{minor}{'a' if major in (9, 10) else ''}"


def driver_error(driver: Any, status: Any, what: str) -> G4kvError:
    """The error to raise for a CUresult: DeviceFault if it is sticky, else DeviceUnavailable.

    ``what`` says what was tried ("launch prep", "allocate the pool").
    """
    name = str(status.name)
    error, text = driver.cuGetErrorString(status)
    words = text.decode(errors="replace") if int(error) == 0 and text else "no explanation"
    kind = FAULT_KINDS.get(name)
    if kind is not None:
        return DeviceFault([f"{kind}: the driver reports {name} ({words}); seen when it was to {what}"], [kind])
    return DeviceUnavailable(f"could not {what}: the driver reports {name} ({words})")


def first_line(error: BaseException) -> str:
    """The first line of an exception's text without its full stop, or its type's name."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def jit_complaint(driver: Any, ptx: bytes) -> str:
    """What the driver's compiler says against PTX, its first line; empty if that says nothing."""
    log = bytes(bytearray(4096))  # cuda.bindings takes bytes, of which the driver then fills the memory
    kinds = driver.CUjit_option
    options = [kinds.CU_JIT_ERROR_LOG_BUFFER, kinds.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
    status, module = driver.cuModuleLoadDataEx(ptx.rstrip(b"\0") + b"\0", len(options), options, [log, len(log)])
    if int(status) == 0:
        driver.cuModuleUnload(module)
    lines = (line.strip() for line in log.partition(b"\0")[0].decode(errors="replace").splitlines())
    return next((line for line in lines if line), "")
