"""Which device is chosen, why, and what is said when none can be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from g4kv_cli.device import cuda as cuda_module
from g4kv_cli.device import cuda_driver
from g4kv_cli.device import open as open_module
from g4kv_cli.device.open import open_device
from g4kv_cli.errors import DeviceUnavailable, UsageError


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a driver: cuda.core's own loader error."""
    import cuda.core

    def fail() -> tuple[object, ...]:
        raise RuntimeError("libcuda.so.1 was not found.\nand more")

    monkeypatch.setattr(cuda.core, "Device", SimpleNamespace(get_all_devices=fail))


def test_a_missing_driver_library_is_said_in_a_few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.core

    class DynamicLibNotFoundError(RuntimeError):
        """As cuda.pathfinder names it; its own text tells a long story about search paths."""

    def fail() -> tuple[object, ...]:
        raise DynamicLibNotFoundError('"cuda" is an NVIDIA driver library and can only be found via system search.')

    monkeypatch.setattr(cuda.core, "Device", SimpleNamespace(get_all_devices=fail))
    assert open_device("auto").info.reason == "no usable CUDA GPU (no CUDA driver: libcuda is not installed)"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Pretend that there are GPUs, some of them unusable."""

    def set_up(*usable: bool) -> None:
        def make(ordinal: int = 0, reason: str = "") -> SimpleNamespace:
            if ordinal >= len(usable) or not usable[ordinal]:
                raise DeviceUnavailable(f"GPU {ordinal} is broken")
            return SimpleNamespace(ordinal=ordinal, info=SimpleNamespace(kind="cuda", reason=reason))

        monkeypatch.setattr(cuda_driver, "count_gpus", lambda: len(usable))
        monkeypatch.setattr(cuda_module, "CudaDevice", make)

    return set_up


def test_auto_without_a_driver_is_emulated_and_says_why(no_gpu: None) -> None:
    device = open_device("auto")
    assert device.info.kind == "emulated"
    assert device.info.reason == "no usable CUDA GPU (no CUDA driver: libcuda.so.1 was not found)"


def test_auto_takes_the_first_usable_gpu(gpus) -> None:  # type: ignore[no-untyped-def]
    gpus(False, True, True)
    device = open_device("auto")
    assert device.ordinal == 1
    assert device.info.reason == "the first usable CUDA GPU"


def test_auto_with_only_unusable_gpus_names_each(gpus) -> None:  # type: ignore[no-untyped-def]
    gpus(False, False)
    reason = open_device("auto").info.reason
    assert "GPU 0 is broken; GPU 1 is broken" in reason


def test_require_gpu_fails_without_one(no_gpu: None) -> None:
    with pytest.raises(DeviceUnavailable, match="a GPU is required, but none can be used: no CUDA driver") as caught:
        open_device("auto", require_gpu=True)
    assert caught.value.exit_code == 2
    assert "--require-gpu" in str(caught.value)


def test_require_gpu_and_an_emulated_device_contradict_each_other() -> None:
    with pytest.raises(DeviceUnavailable, match="--device emulated is none"):
        open_device("emulated", require_gpu=True)


@pytest.mark.parametrize("spec", ["cuda", "cuda:0", "cuda:3"])
def test_an_explicit_gpu_never_falls_back(no_gpu: None, spec: str) -> None:
    with pytest.raises(DeviceUnavailable) as caught:
        open_device(spec)
    text = str(caught.value)
    assert text.startswith(f"--device {spec} cannot be used: no CUDA driver: libcuda.so.1 was not found;")
    assert "--device emulated" in text
    assert "\n" not in text


def test_an_explicit_gpu_is_the_one_named(gpus) -> None:  # type: ignore[no-untyped-def]
    gpus(True, True)
    assert open_device("cuda:1").ordinal == 1
    assert open_device("cuda").ordinal == 0


def test_a_driver_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.core

    monkeypatch.setattr(cuda.core, "Device", SimpleNamespace(get_all_devices=tuple))
    assert open_device("auto").info.reason == "no usable CUDA GPU (the CUDA driver shows no GPU)"


@pytest.mark.parametrize("spec", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "emulated:", "CUDA", "auto:0", "cuda:1 "])
def test_any_other_text_is_a_usage_error(spec: str) -> None:
    with pytest.raises(UsageError, match="use auto, cuda, cuda:N, emulated or emulated:sm_80"):
        open_device(spec)


def test_an_explicit_emulated_device_asks_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> int:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(cuda_driver, "count_gpus", forbidden)
    device = open_device("emulated:sm_80")
    assert device.info.arch == "sm_80"
    assert device.info.reason == "chosen with --device emulated:sm_80"
    assert open_module.open_device("emulated").info.arch == "sm_90"
