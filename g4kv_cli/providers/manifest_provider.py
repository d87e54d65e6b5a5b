"""A provider out of a manifest: metadata in the engine's form, scratch, and its launches or calls, in order."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.device.interface import Device, DeviceArray, Launch, LoadedKernel, PagedReads
from g4kv_cli.entries.contract import NO_PAGE_ORIGIN
from g4kv_cli.entries.entry import Entry
from g4kv_cli.entries.provider import CheckedRequest, NotCovered
from g4kv_cli.entries.table import entry_named
from g4kv_cli.errors import ContractError, DeviceFault, DeviceUnavailable, UsageError
from g4kv_cli.model.geometry import Geometry
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS
from g4kv_cli.oracle.compare import POISON_BYTE
from g4kv_cli.providers.builder import LaunchFacts
from g4kv_cli.providers.callables import call_function
from g4kv_cli.providers.expression import Expression, ExpressionError
from g4kv_cli.providers.images import ImageStore
from g4kv_cli.providers.manifest import EntrySpec, MadeArray, Manifest, Step, Waiver
from g4kv_cli.providers.packing import c_argument, element_type, extents_of, packed, python_arguments, values_of
from g4kv_cli.providers.pool_form import StagedPool
from g4kv_cli.providers.scope import (
    PARTIAL_ARRAYS,
    addresses_of,
    input_arrays,
    is_folded,
    optional_arrays,
    page_pieces,
    pool_shape,
    scope_of,
)


class ManifestProvider:
    """Serves entries as a manifest says. ``waived`` counts tolerated reports by waiver."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.name = manifest.name
        self.pool_order = manifest.pool_order
        self.images = ImageStore(manifest)
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

    def compile_libraries(self, entry: Entry, device: Device) -> None:
        """Compile the sources with host code that the entry calls, as far as their names follow from it. Raises
        CompileError."""
        for step in self.spec_of(entry.name).steps:
            try:
                name = step.image.format({"head_dim": entry.head_dim})
            except ExpressionError:
                continue
            image = self.manifest.images.get(name)
            if image is not None and image.is_compiled:
                self.images.library(name, device)

    def problem_of_pool(self, geometries: Sequence[Geometry]) -> str:
        """Why the form of its pool is none on any of these; empty if it is one, or there is none."""
        problem = ""
        for heads, head_dim in {(one.num_kv_heads, one.head_dim) for one in geometries}:
            try:
                for part in () if self.manifest.pool_form is None else self.manifest.pool_form.parts:
                    part.require_good((2, 2, 2, DEFAULT_PAGE_SIZE_TOKENS, heads, head_dim))
            except NotCovered:
                continue
            except UsageError as error:
                problem = problem or str(error)
                continue
            return ""
        return problem

    def copies(self, entry: str) -> str:
        """What of the entry's calls is copied through the host, in words; empty for nothing. Such a call can neither be
        made twice nor recorded into a graph. Raises NotCovered."""
        spec = self.spec_of(entry)
        if self.manifest.pool_form is not None:
            return "the pool is copied into the engine's form"
        if spec.host_names.intersection(input_arrays(entry_named(entry))):
            return "inputs are copied into the engine's form"
        return "results are copied out of the engine's form" if spec.results else ""

    def launch(self, request: CheckedRequest) -> None:
        """Queue the entry's launches. Raises NotCovered, CompileError, DeviceFault, or UsageError with a line."""
        call = self.prepare(request)
        try:
            call.run()
        finally:
            call.release()

    def prepare(self, request: CheckedRequest) -> PreparedCall:
        """Everything of a call but its launches: the engine's metadata and scratch are on the device.

        Raises NotCovered, or UsageError with a line.
        """
        spec = self.spec_of(request.entry.name)
        if is_folded(request) and (self.manifest.pool_form is not None or not self.pool_order.is_own):
            raise NotCovered("a pool of folded rows has the built-in order of axes, not that of [pool]")
        scope = scope_of(request, self.pool_order, spec.host_names, self.manifest.pool_form)
        if not self.manifest.contract.page_origin and np.any(scope.get("page_origins", scope.get("page_origin", 0))):
            raise NotCovered(NO_PAGE_ORIGIN)
        made_here = {name for name, _ in spec.let}
        self._require_covered(spec, scope, lambda condition: not condition.names & made_here)
        for name in spec.requires:
            if name not in request.arrays:
                raise NotCovered(f"needs {name}, which the call does not have")
        for name, expression in spec.let:
            scope[name] = self.evaluated(spec.line, lambda value=expression: value.evaluate(scope))  # type: ignore[misc]
        self._require_covered(spec, scope, lambda condition: bool(condition.names & made_here))
        made = _Made(request)
        call = PreparedCall(self, request, spec, scope, made)
        try:
            self._stage(made, spec)
            self._fill(spec, scope, made, late=False)
            call.take_steps(spec.prepare)
            self._fill(spec, scope, made, late=True)
        except DeviceUnavailable as error:
            # The engine's scratch may be far larger than anything that the call itself needs.
            made.release()
            raise NotCovered(str(error)) from error
        except BaseException:
            made.release()
            raise
        return call

    def _require_covered(self, spec: EntrySpec, scope: dict[str, Any], chosen: Callable[[Expression], bool]) -> None:
        """Raises NotCovered where one of the chosen conditions does not hold."""
        for condition, why in spec.only_if:
            if chosen(condition) and not self.evaluated(spec.line, lambda rule=condition: rule.truth(scope)):  # type: ignore[misc]
                raise NotCovered(why)

    def judge(self, fault: DeviceFault) -> None:
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

    def evaluated(self, line: int, compute: Callable[[], Any]) -> Any:
        """What ``compute`` gives; an expression's error comes with its file and line."""
        try:
            return compute()
        except (ExpressionError, ValueError) as error:
            raise self.error_at(line, str(error)) from error

    def error_at(self, line: int, words: str) -> UsageError:
        """An error at a line of the manifest."""
        return UsageError(f"{self.manifest.file}:{line}: {words}")

    def _stage(self, made: _Made, spec: EntrySpec) -> None:
        """Put the pool into the engine's form, where it has one."""
        form, shape = self.manifest.pool_form, pool_shape(made.request)
        if form is None or shape is None:
            return
        try:
            made.stage(StagedPool(form, made.request, shape))
        except UsageError as error:
            raise self.error_at(spec.line, str(error)) from error

    def _fill(self, spec: EntrySpec, scope: dict[str, Any], made: _Made, *, late: bool) -> None:
        """Upload the engine's index arrays, allocate scratch full of NaN, and last what is made of addresses: all that
        waits for the calls of ``prepare``, or all that does not."""
        device, waiting = made.request.device, spec.late_names
        behind = [(array, False) for array in spec.arrays] + [(array, True) for array in spec.host]
        behind = [(array, is_host) for array, is_host in behind if (array.name in waiting) is late]
        for array, is_host in behind:
            if not array.is_of_addresses:
                self._make(spec, array, scope, made, is_host=is_host)
        for array in spec.workspace:
            if (array.name in waiting) is not late:
                continue
            count = self.evaluated(spec.line, lambda item=array: item.value.integer(scope))  # type: ignore[misc]
            scratch = made.keep(array.name, device.allocate((max(1, count),), element_type(array.kind), array.name))
            device.fill(scratch, POISON_BYTE)
        for array, is_host in behind:
            if array.is_of_addresses:
                self._make(spec, array, scope, made, is_host=is_host)

    def _make(self, spec: EntrySpec, array: MadeArray, scope: dict[str, Any], made: _Made, *, is_host: bool) -> None:
        addresses = made.all_addresses(scope)
        maps = made.request.device.tensor_map_at
        values = self.evaluated(spec.line, lambda: values_of(array, scope, addresses, maps))
        scope[array.name] = values
        if is_host:
            made.host[array.name] = values
        else:
            kept = values if values.size else np.zeros(1, values.dtype)
            made.keep(array.name, made.request.device.upload(kept, array.name))


class PreparedCall:
    """One request's launches, which can be queued again and again: into a graph too."""

    def __init__(
        self,
        provider: ManifestProvider,
        request: CheckedRequest,
        spec: EntrySpec,
        scope: dict[str, Any],
        made: _Made,
    ) -> None:
        self._provider, self._request, self._spec, self._scope, self._made = provider, request, spec, scope, made
        self._addresses: Mapping[str, Any] = {}
        self._arrays: dict[str, DeviceArray] = {}

    def take_steps(self, steps: Sequence[Step]) -> None:
        """Queue these steps in order."""
        provider, scope = self._provider, self._scope
        self._arrays = {**self._made.call_arrays, **self._made.arrays}
        for step in steps:
            self._addresses = self._made.all_addresses(scope)
            condition = step.condition
            if condition is None or provider.evaluated(step.line, lambda rule=condition: rule.truth(scope)):  # type: ignore[misc]
                self._step(step)

    def run(self) -> None:
        """Queue the entry's steps in order."""
        provider = self._provider
        self.take_steps(self._spec.steps)
        if self._made.staged is not None:
            try:
                self._made.staged.give_back()
            except DeviceFault as fault:
                provider.judge(fault)
        for name, expression in self._spec.results:
            self._result(name, expression)
        if provider.manifest.contract.lse == "log2" and "lse" in self._request.arrays:
            _to_natural(self._request.device, self._request.arrays["lse"])

    def release(self) -> None:
        """Free what was made for the call."""
        self._made.release()

    def _step(self, step: Step) -> None:
        provider, request, scope, addresses = self._provider, self._request, self._scope, self._addresses
        image = provider.evaluated(step.line, lambda: step.image.format(scope))
        if provider.images.image(image).kind == "python":
            self._call_python(step, image)
            return
        if step.call is not None:
            function = provider.evaluated(step.line, lambda: step.call.format(scope))  # type: ignore[union-attr]
            given = provider.evaluated(
                step.line, lambda: [c_argument(item, scope, addresses) for item in step.arguments]
            )
            self._require_stream(step)
            value = provider.images.call(
                image, function, given, step.returns, request.device, self._launch, self._padding(), self._reads()
            )
            if step.gives:
                (self._made.given if step.returns == "ptr" else scope)[step.gives] = value
            return
        pattern = step.symbol
        symbol = "" if pattern is None else provider.evaluated(step.line, lambda: pattern.format(scope))
        facts = provider.images.facts(image, scope, request.device)
        scope.update(facts.names)
        # Of several images one may have none of these kernels.
        is_one_image = image == step.image.text
        family = pattern.with_any_number if pattern is not None and is_one_image else ""
        kernel = provider.images.kernel(facts, image, symbol, request.device, family)
        if kernel is None:
            lacking = f"image {image} has no kernel that matches {step.symbol and step.symbol.text!r}"
            raise provider.error_at(step.line, f"{lacking}; it has {provider.images.names_of(image)}")
        grid, block, cluster = (
            provider.evaluated(step.line, lambda extents=extents: extents_of(extents, scope))  # type: ignore[misc]
            for extents in (step.grid, step.block or facts.block, step.cluster)
        )
        if min(grid) < 1:
            return  # nothing to do, as a launcher that returns early
        shared = provider.evaluated(step.line, lambda: (step.shared or facts.shared).integer(scope))
        try:
            maps = request.device.tensor_map_at
            arguments = provider.evaluated(step.line, lambda: packed(step, facts, scope, addresses, maps))
            launch = Launch(
                grid, block, arguments, shared, self._written_by(step), self._padding(), cluster, step.overlap,
                self._reads(), step.cooperative,
            )  # fmt: skip
            self._launch(kernel, launch)
        except ContractError as error:
            raise provider.error_at(step.line, f"{error}{_given(step, facts, error.field)}") from error

    def _result(self, name: str, expression: Expression) -> None:
        """Fill an output from what the steps wrote elsewhere."""
        provider, request, line = self._provider, self._request, self._spec.line
        if name not in request.outputs:
            if name in optional_arrays(request.entry):
                return
            raise provider.error_at(
                line, f"results: {name!r} is no output of the call; it has {', '.join(request.outputs)}"
            )
        held = {
            made: request.device.read(self._made.arrays[made]) for made in expression.names & self._made.arrays.keys()
        }
        values = np.asarray(provider.evaluated(line, lambda: expression.evaluate({**self._scope, **held})))
        output = request.arrays[name]
        if values.shape != output.shape:
            raise provider.error_at(
                line, f"results: {name} is {list(output.shape)}, and {expression.text!r} {list(values.shape)}"
            )
        request.device.write(output, np.ascontiguousarray(values.astype(output.dtype)))

    def _call_python(self, step: Step, image: str) -> None:
        """Call a Python function with the step's arguments by name."""
        provider, request = self._provider, self._request
        shape = pool_shape(request)
        # Of an index array a function sees what is in use, as the host knows it.
        shapes = {name: self._scope[name].shape for name in request.arrays if name in self._scope}
        if shape is not None:
            shapes |= (
                self._made.staged.shapes if self._made.staged else {"pool": provider.pool_order.physical_shape(shape)}
            )
        outputs = {*request.outputs, *(array.name for array in self._spec.workspace), *step.writes}
        outputs |= {name for _, expression in self._spec.results for name in expression.names}
        outputs |= {"pool", "k_pool", "v_pool"} if request.entry.writes_pool else set()
        outputs |= set(PARTIAL_ARRAYS) if request.entry.merge_kernels else set()
        absent = [name for name in optional_arrays(request.entry) if name not in self._arrays]
        self._written_by(step)
        tensors, values = provider.evaluated(
            step.line, lambda: python_arguments(step, self._scope, self._arrays, shapes, outputs, absent)
        )
        function = provider.images.function(image)
        name = provider.images.image(image).function
        returnable: dict[str, DeviceArray | None] = {
            each: self._arrays[each].view(shapes.get(each, self._arrays[each].shape))
            for each in sorted(outputs & self._arrays.keys())
        }
        returnable |= {name: None for name in absent if name not in input_arrays(request.entry)}
        call_function(function, name, tensors, values, request.device, returnable)

    def _launch(self, kernel: LoadedKernel, launch: Launch) -> None:
        try:
            self._request.device.launch(kernel, launch)
        except DeviceFault as fault:
            self._provider.judge(fault)

    def _require_stream(self, step: Step) -> None:
        """A graph records one stream: a function that does not get it cannot be recorded."""
        given = any(item.value is not None and "stream" in item.value.names for item in step.arguments)
        if self._request.device.is_capturing and not given:
            raise NotCovered(
                "a graph is recorded from one stream: give the function 'ptr stream', and let it launch there"
            )

    def _written_by(self, step: Step) -> tuple[DeviceArray, ...]:
        writes = []
        for name in step.writes:
            if name in self._arrays:
                writes.append(self._arrays[name])
            elif name not in optional_arrays(self._request.entry):
                raise self._provider.error_at(step.line, f"writes {name!r}, which is no array of the call")
        return tuple(writes)

    def _reads(self) -> tuple[PagedReads, ...]:
        """What may be read of the pool, where pages lie as the built-in kernels have them."""
        reads = self._request.paged_reads
        is_own = self._provider.pool_order.is_own and self._made.staged is None
        return (reads,) if reads is not None and is_own else ()

    def _padding(self) -> tuple[DeviceArray, ...]:
        """The memory of the padding page, where several blocks may store."""
        request = self._request
        if request.padding_page is None or "pool" not in request.arrays:
            return ()
        if self._made.staged is not None:
            return self._made.staged.pieces_of_page(request.padding_page)
        pieces = page_pieces(request, self._provider.pool_order, request.padding_page)
        return tuple(request.arrays["pool"].view((count,), offset_elems=begin) for begin, count in pieces)


def names_entry(spec: EntrySpec, entry: str) -> bool:
    """Whether one of the spec's patterns is the entry's name."""
    return any(fnmatch.fnmatchcase(entry, pattern) for pattern in spec.names)


def _given(step: Step, facts: LaunchFacts, field: str) -> str:
    """What the manifest gives for the argument that an error is about, in its own words; empty for other errors."""
    found = re.search(r"argument (\d+)$", field)
    if found is None:
        return ""
    names, at = facts.arguments, int(found[1])
    named = dict(step.named)
    spec = named.get(names[at]) if names is not None and at < len(names) else None
    if names is None and at < len(step.arguments):
        spec = step.arguments[at]
    return "" if spec is None else f": the manifest gives {spec.text!r}"


def _tolerates(waiver: Waiver, kind: str, line: str) -> bool:
    return waiver.kind == kind and waiver.where.search(line) is not None


class _Made:
    """Arrays that one call makes, freed behind it."""

    def __init__(self, request: CheckedRequest) -> None:
        self.request = request
        self.call_arrays: dict[str, DeviceArray] = dict(request.arrays)
        """The call's own, with the pool in the engine's form where that is another."""
        self.arrays: dict[str, DeviceArray] = {}
        self.host: dict[str, npt.NDArray[Any]] = {}
        self.given: dict[str, int] = {}
        """What functions returned, by the name that a step gives to it: addresses."""
        self.staged: StagedPool | None = None

    def all_addresses(self, scope: dict[str, Any]) -> Mapping[str, Any]:
        """Where everything lies: the call's arrays, and what was made for it up to now."""
        made = {name: array.address for name, array in self.arrays.items()}
        made |= {name: values.ctypes.data for name, values in self.host.items()} | self.given
        return addresses_of(self.request, self.call_arrays, made, scope)

    def stage(self, staged: StagedPool) -> None:
        self.staged = staged
        del self.call_arrays["pool"]
        self.call_arrays |= staged.arrays

    def keep(self, name: str, array: DeviceArray) -> DeviceArray:
        self.arrays[name] = array
        return array

    def release(self) -> None:
        try:
            staged = self.staged.arrays.values() if self.staged is not None else ()
            self.request.device.free_all([*self.arrays.values(), *staged])
        except DeviceFault:
            self.arrays.clear()  # after a fault the device goes, and its memory with it


def _to_natural(device: Device, lse: DeviceArray) -> None:
    """A log-sum-exp to base 2, as the engine gives it, to the natural one that the checks compare."""
    values = device.read(lse).astype(np.float64) * np.log(2.0)
    device.write(lse, values.astype(np.float32))
