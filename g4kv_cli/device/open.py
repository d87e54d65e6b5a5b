"""The only place that chooses a device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from g4kv_cli.errors import DeviceUnavailable, UsageError

if TYPE_CHECKING:
    from g4kv_cli.device.interface import Device

_SPEC = re.compile(r"auto|cuda(?::(?P<ordinal>\d+))?|emulated(?::(?P<arch>\S+))?")


def open_device(spec: str = "auto", require_gpu: bool = False) -> Device:
    """Open ``auto``, ``cuda``, ``cuda:N``, ``emulated`` or ``emulated:sm_80``; ``info.reason`` says why.

    ``auto`` takes the first usable CUDA GPU, else the emulated device; with ``require_gpu`` a missing GPU is
    DeviceUnavailable instead. An explicit device never falls back. Raises UsageError for any other text.
    """
    matched = _SPEC.fullmatch(spec)
    if matched is None:
        raise UsageError(f"unknown device {spec!r}; use auto, cuda, cuda:N, emulated or emulated:sm_80")
    if spec == "auto":
        return _open_auto(require_gpu)
    if spec.startswith("cuda"):
        return _open_cuda(spec, int(matched["ordinal"] or 0))
    if require_gpu:
        raise DeviceUnavailable(f"a GPU is required, but --device {spec} is none; drop one of the two options")
    return _open_emulated(matched["arch"], f"chosen with --device {spec}")


def _open_auto(require_gpu: bool) -> Device:
    from g4kv_cli.device.cuda import CudaDevice
    from g4kv_cli.device.cuda_driver import count_gpus

    try:
        failures: list[str] = []
        for ordinal in range(count_gpus()):
            try:
                return CudaDevice(ordinal, "the first usable CUDA GPU")
            except DeviceUnavailable as error:
                failures.append(str(error))
        why = "; ".join(failures)
    except DeviceUnavailable as error:
        why = str(error)
    if require_gpu:
        raise DeviceUnavailable(
            f"a GPU is required, but none can be used: {why}; run without --require-gpu to use the emulated device"
        )
    return _open_emulated(None, f"no usable CUDA GPU ({why})")


def _open_cuda(spec: str, ordinal: int) -> Device:
    from g4kv_cli.device.cuda import CudaDevice

    try:
        return CudaDevice(ordinal, f"chosen with --device {spec}")
    except DeviceUnavailable as error:
        raise DeviceUnavailable(
            f"--device {spec} cannot be used: {error}; use --device emulated to run without a GPU"
        ) from error


def _open_emulated(arch: str | None, reason: str) -> Device:
    from g4kv_cli.device.emulated_device import DEFAULT_ARCH, EmulatedDevice

    return EmulatedDevice(arch or DEFAULT_ARCH, reason)
