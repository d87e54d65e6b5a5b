"""A provider out of a manifest: metadata in the engine's form, scratch, and its launches or calls, in order."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from g4kv_cli.device.arguments import Argument, by_value, pointer, scalar
from g4kv_cli.device.interface import Device, DeviceArray, Launch, LoadedKernel, PagedReads
from g4kv_cli.entries.provider import CheckedRequest, NotCovered
from g4kv_cli.errors import DeviceFault, UsageError
from g4kv_cli.model.pool_order import PoolOrder
from g4kv_cli.providers.expression import Expression, ExpressionError
from g4kv_cli.providers.images import ImageStore, LaunchFacts
from g4kv_cli.providers.manifest import ArgumentSpec, EntrySpec, MadeArray, Manifest, Step, Waiver
from g4kv_cli.providers.scope import addresses_of, pool_shape, scope_of

POISON_BYTE = 0xFF
_ELEMENTS: dict[str, np.dtype[Any]] = {
    **{
        f"{sign}{bits}": np.dtype(f"{'uint' if sign == 'u' else 'int'}{bits}")
        for sign in "iu"
        for bits in (8, 16, 32, 64)
    },
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "bool": np.dtype(np.uint8),
}


class ManifestProvider:
    """Serves entries as a manifest says. ``used`` counts launches by kernel, ``waived`` reports by waiver."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.name = manifest.name
        self.pool_order = PoolOrder.parse(" ".join(manifest.pool_axes))
        self.images = ImageStore(manifest)
        self.used: Counter[str] = Counter()
        self.waived: Counter[int] = Counter()

    def take_waived(self) -> tuple[str, ...]:
        """The waivers that tolerated something since the last call."""
        used = tuple(self.waiver_text(number) for number in sorted(self.waived))
        self.waived.clear()
        return used

    def waiver_text(self, number: int) -> str:
        """A waiver as records and summaries name it."""
        waiver = self.manifest.waivers[number]
        return f"{self.name}: {waiver.kind} at {waiver.where.pattern}: {waiver.why}"

    def serves(self, entry: str) -> bool:
        """Whether the manifest has an entry of this name."""
        return any(names_entry(spec, entry) for spec in self.manifest.entries)

    def spec_of(self, entry: str) -> EntrySpec:
        """The manifest's entry that serves this one. Raises NotCovered."""
        for spec in self.manifest.entries:
            if names_entry(spec, entry):
                return spec
        raise NotCovered(f"{self.name} has no entry {entry}")

    def launch(self, request: CheckedRequest) -> None:
        """Queue the entry's launches. Raises NotCovered, CompileError, DeviceFault, or UsageError with a line."""
        spec = self.spec_of(request.entry.name)
        device, made = request.device, _Made(request.device)
        scope = scope_of(request, self.pool_order)
        if not self.manifest.contract.page_origin and np.any(scope.get("page_origins", scope.get("page_origin", 0))):
            raise NotCovered("page_origin = false: rows of pages begin at a request's first page")
        for condition, why in spec.only_if:
            if not self._evaluated(spec.line, lambda rule=condition: rule.truth(scope)):  # type: ignore[misc]
                raise NotCovered(why)
        for name in spec.requires:
            if name not in request.arrays:
                raise NotCovered(f"needs {name}, which the call does not have")
        for name, expression in spec.let:
            scope[name] = self._evaluated(spec.line, lambda value=expression: value.evaluate(scope))  # type: ignore[misc]
        try:
            for array in spec.arrays:
                values = self._evaluated(spec.line, lambda item=array: _values(item, scope))  # type: ignore[misc]
                scope[array.name] = values
                made.keep(array.name, device.upload(values if values.size else np.zeros(1, values.dtype), array.name))
            for array in spec.workspace:
                count = self._evaluated(spec.line, lambda item=array: item.value.integer(scope))  # type: ignore[misc]
                scratch = made.keep(array.name, device.allocate((max(1, count),), _ELEMENTS[array.kind], array.name))
                device.fill(scratch, POISON_BYTE)
            addresses = addresses_of(request, made.addresses, scope)
            for step in spec.steps:
                if step.condition is None or self._evaluated(step.line, lambda item=step: item.condition.truth(scope)):  # type: ignore[misc]
                    self._step(request, step, scope, addresses, {**request.arrays, **made.arrays})
            if self.manifest.contract.lse == "log2" and "lse" in request.arrays:
                _to_natural(device, request.arrays["lse"])
        finally:
            made.release()

    def _step(
        self,
        request: CheckedRequest,
        step: Step,
        scope: dict[str, Any],
        addresses: Mapping[str, Any],
        arrays: Mapping[str, DeviceArray],
    ) -> None:
        may_collide = self._padding(request)
        image = self._evaluated(step.line, lambda: step.image.format(scope))

        def run(kernel: LoadedKernel, launch: Launch) -> None:
            self.used[kernel.name] += 1
            try:
                request.device.launch(kernel, launch)
            except DeviceFault as fault:
                self._judge(fault)

        if step.call is not None:
            function = self._evaluated(step.line, lambda: step.call.format(scope))  # type: ignore[union-attr]
            arguments = self._evaluated(step.line, lambda: [_number(item, scope, addresses) for item in step.arguments])
            self.images.call(image, function, arguments, request.device, run, may_collide, self._reads(request))
            return
        pattern = step.symbol
        symbol = "" if pattern is None else self._evaluated(step.line, lambda: pattern.format(scope))
        facts = self.images.facts(image, scope)
        scope.update(facts.names)
        kernel = self.images.kernel(facts, image, symbol, request.device)
        grid, block, cluster = (
            self._evaluated(step.line, lambda extents=extents: _extents(extents, scope))  # type: ignore[misc]
            for extents in (step.grid, step.block or facts.block, step.cluster)
        )
        if min(grid) < 1:
            return  # nothing to do, as a launcher that returns early
        packed = self._evaluated(step.line, lambda: _packed(step, facts, scope, addresses))
        shared = self._evaluated(step.line, lambda: (step.shared or facts.shared).integer(scope))
        writes = []
        for name in step.writes:
            if name in arrays:
                writes.append(arrays[name])
            elif name not in ("lse",):
                raise self._at(step.line, f"writes {name!r}, which is no array of the call")
        run(
            kernel,
            Launch(grid, block, packed, shared, tuple(writes), may_collide, cluster, paged_reads=self._reads(request)),
        )

    def _reads(self, request: CheckedRequest) -> tuple[PagedReads, ...]:
        """What may be read of the pool, where pages lie as the built-in kernels have them."""
        reads = request.paged_reads
        return (reads,) if reads is not None and self.pool_order.is_own else ()

    def _padding(self, request: CheckedRequest) -> tuple[DeviceArray, ...]:
        """The memory of the padding page, where several blocks may store."""
        shape = pool_shape(request)
        if request.padding_page is None or shape is None:
            return ()
        pieces = self.pool_order.page_pieces(request.padding_page, shape)
        return tuple(request.arrays["pool"].view((count,), offset_elems=begin) for begin, count in pieces)

    def _judge(self, fault: DeviceFault) -> None:
        """Raise what no waiver tolerates; the others are counted."""
        left = []
        for line, kind in zip(fault.reports, fault.kinds, strict=True):
            numbers = (at for at, waiver in enumerate(self.manifest.waivers) if _tolerates(waiver, kind, line))
            number = next(numbers, None)
            if number is None:
                left.append((line, kind))
            else:
                self.waived[number] += 1
        if left:
            raise DeviceFault([line for line, _ in left], [kind for _, kind in left])

    def _evaluated(self, line: int, compute: Callable[[], Any]) -> Any:
        try:
            return compute()
        except ExpressionError as error:
            raise self._at(line, str(error)) from error
        except ValueError as error:
            raise self._at(line, str(error)) from error

    def _at(self, line: int, words: str) -> UsageError:
        return UsageError(f"{self.manifest.file}:{line}: {words}")


def names_entry(spec: EntrySpec, entry: str) -> bool:
    """Whether one of the spec's patterns is the entry's name."""
    return any(fnmatch.fnmatchcase(entry, pattern) for pattern in spec.names)


def _tolerates(waiver: Waiver, kind: str, line: str) -> bool:
    return waiver.kind == kind and waiver.where.search(line) is not None


class _Made:
    """Arrays that one call makes, freed behind it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.arrays: dict[str, DeviceArray] = {}

    @property
    def addresses(self) -> dict[str, int]:
        return {name: array.address for name, array in self.arrays.items()}

    def keep(self, name: str, array: DeviceArray) -> DeviceArray:
        self.arrays[name] = array
        return array

    def release(self) -> None:
        try:
            self._device.free_all(list(self.arrays.values()))
        except DeviceFault:
            self.arrays.clear()  # after a fault the device goes, and its memory with it


def _values(array: MadeArray, scope: Mapping[str, Any]) -> Any:
    """Host values of an element kind. Raises ExpressionError if one does not fit it."""
    values = np.asarray(array.value.evaluate(scope))
    kind = _ELEMENTS[array.kind]
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        if values.size and (values.min() < limits.min or values.max() > limits.max):
            raise ExpressionError(f"{array.name}: values from {values.min()} to {values.max()} do not fit {array.kind}")
    return np.ascontiguousarray(values.astype(kind))


def _extents(items: Sequence[Expression], scope: Mapping[str, Any]) -> tuple[int, int, int]:
    found = [item.integer(scope) for item in items]
    x, y, z = (*found, 1, 1, 1)[:3]
    return (x, y, z)


def _packed(
    step: Step, facts: LaunchFacts, scope: Mapping[str, Any], addresses: Mapping[str, Any]
) -> tuple[Argument, ...]:
    if facts.arguments is None:
        return tuple(_argument(item, scope, addresses) for item in step.arguments)
    named = dict(step.named)
    missing = [name for name in facts.arguments if name not in named]
    if missing:
        raise ExpressionError(f"the kernel takes {', '.join(missing)}, which 'named' does not give")
    return (*(_argument(named[name], scope, addresses) for name in facts.arguments), *facts.trailing)


def _argument(spec: ArgumentSpec, scope: Mapping[str, Any], addresses: Mapping[str, Any]) -> Argument:
    if spec.kind == "struct":
        return by_value(_struct(spec, scope, addresses)[0])
    if spec.value is None:
        raise ExpressionError("an argument without a value")
    if spec.kind == "ptr":
        return pointer(spec.value.integer(addresses))
    value = spec.value.evaluate(scope)
    return scalar(spec.kind, float(value) if spec.kind in ("f32", "f64") else spec.value.integer(scope))


def _struct(spec: ArgumentSpec, scope: Mapping[str, Any], addresses: Mapping[str, Any]) -> tuple[bytes, int]:
    """A struct's bytes and alignment by C's rules: each field at a multiple of its own, the end of the largest."""
    raw, most = bytearray(), 1
    for field in spec.fields:
        if field.kind == "struct":
            data, align = _struct(field, scope, addresses)
        else:
            data = _argument(field, scope, addresses).data
            align = len(data)
        raw += b"\0" * (-len(raw) % align) + data
        most = max(most, align)
    return bytes(raw + b"\0" * (-len(raw) % most)), most


def _number(spec: ArgumentSpec, scope: Mapping[str, Any], addresses: Mapping[str, Any]) -> tuple[str, float]:
    if spec.value is None:
        raise ExpressionError("a C function takes numbers and pointers, not structs by value")
    if spec.kind == "ptr":
        return "ptr", spec.value.integer(addresses)
    if spec.kind in ("f32", "f64"):
        return spec.kind, float(spec.value.evaluate(scope))
    value = spec.value.integer(scope)
    scalar(spec.kind, value)  # type: ignore[arg-type]
    return spec.kind, value


def _to_natural(device: Device, lse: DeviceArray) -> None:
    """A log-sum-exp to base 2, as the engine gives it, to the natural one that the checks compare."""
    values = device.read(lse).astype(np.float64) * np.log(2.0)
    device.write(lse, values.astype(np.float32))
