"""What every device checks the same way before it touches memory or launches."""

from __future__ import annotations

from collections.abc import Sequence

from g4kv_cli.device.arguments import Argument
from g4kv_cli.device.interface import DeviceArray, DeviceLimits, HostArray, Launch
from g4kv_cli.records.rules import launch_rule

LAUNCH_BLOCK = launch_rule("launch_block", "does not fit the device")
LAUNCH_GRID = launch_rule("launch_grid", "has more blocks than the device takes, or none")
LAUNCH_CLUSTER = launch_rule("launch_cluster", "does not fill the grid")
LAUNCH_SHARED = launch_rule("launch_shared", "is more than the device has in a block")
LAUNCH_PARAMETERS = launch_rule("launch_parameters", "differs from what the kernel declares")
LAUNCH_REFUSED = launch_rule("launch_refused", "is no launch that the device takes")
TENSOR_MAP = launch_rule("tensor_map", "has no tensor map of this shape")


def require_contiguous(array: DeviceArray, purpose: str) -> None:
    """Raises ValueError if the array is not row-contiguous, or does not lie inside its allocation."""
    if not array.is_contiguous:
        raise ValueError(f"cannot {purpose} {array.label}: its strides {array.strides_bytes} leave gaps")
    if array.offset_bytes < 0 or array.offset_bytes + array.nbytes > array.allocation.nbytes:
        raise ValueError(
            f"cannot {purpose} {array.label}: bytes {array.offset_bytes} to "
            f"{array.offset_bytes + array.nbytes} are not inside its {array.allocation.nbytes} bytes"
        )


def require_same_kind(array: DeviceArray, values: HostArray) -> None:
    """Raises ValueError unless host values have the array's shape and dtype."""
    if values.shape != array.shape or values.dtype != array.dtype:
        raise ValueError(
            f"{array.label} holds {array.dtype} {list(array.shape)}, not {values.dtype} {list(values.shape)}"
        )


def check_launch(limits: DeviceLimits, launch: Launch, kernel_name: str) -> None:
    """Hold a launch against the device's limits (threads, blocks, bytes). Raises ContractError."""
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    LAUNCH_BLOCK.require(
        min(launch.block) >= 1 and threads <= limits.max_threads_per_block,
        f"{kernel_name} block",
        launch.block,
        f"1 to {limits.max_threads_per_block} threads",
    )
    LAUNCH_GRID.require(
        min(launch.grid) >= 1 and all(got <= most for got, most in zip(launch.grid, limits.max_grid, strict=True)),
        f"{kernel_name} grid",
        launch.grid,
        f"1 to {limits.max_grid} blocks",
    )
    LAUNCH_CLUSTER.require(
        all(size >= 1 and extent % size == 0 for size, extent in zip(launch.cluster, launch.grid, strict=True)),
        f"{kernel_name} cluster",
        launch.cluster,
        f"divisors of the grid {launch.grid}",
    )
    LAUNCH_SHARED.require(
        0 <= launch.dynamic_shared_bytes <= limits.max_shared_bytes_per_block,
        f"{kernel_name} dynamic_shared_bytes",
        launch.dynamic_shared_bytes,
        f"0 to {limits.max_shared_bytes_per_block} bytes",
    )


def check_arguments(arguments: Sequence[Argument], kernel_name: str, parameter_bytes: Sequence[int]) -> None:
    """Raises ContractError unless there is one argument for each parameter that the kernel declares, of its size."""
    LAUNCH_PARAMETERS.require(
        len(arguments) == len(parameter_bytes),
        f"{kernel_name} number of arguments",
        len(arguments),
        len(parameter_bytes),
    )
    for number, (argument, nbytes) in enumerate(zip(arguments, parameter_bytes, strict=True)):
        LAUNCH_PARAMETERS.require(
            len(argument.data) == nbytes,
            f"{kernel_name} argument {number}",
            f"{argument.kind} of {len(argument.data)} bytes",
            f"{nbytes} bytes",
        )
