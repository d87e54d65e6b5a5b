"""What kernels promise, by statement; the built-in ones promise all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from g4kv_cli.model.kv_format import SPLIT, KvFormat

OUTPUTS = ("out", "lse")

NO_PAGE_ORIGIN = "page_origin = false: rows of pages begin at a request's first page"
"""Why kernels that state it do not cover a request whose first pages are gone."""


@dataclass(frozen=True, slots=True)
class Contract:
    """Statements about kernels. Each has a meaning of its own, and limits follow from stated roundings: none is free.

    rounds_to_bf16_after: ``norm``: prep rounds q and k once more, between the norm and the rotation.
    split_partials: ``bf16``: a split's partial result is rounded before it is merged.
    lse_weights: ``bf16``: the log-sum-exp sums weights that were rounded.
    lse: the base of the log-sum-exp that the kernels give.
    outputs: which of out and lse they give.
    unseen_keys: ``finite``: keys in front of the window, in pages that are still there, must be finite numbers.
    batch_invariant: a request has the same bits whatever its companions are.
    bits_with_released_pages: and whether pages in front of the window are still there or not.
    traps: prep kernels stop on contradictory metadata that only the device knows.
    page_origin: rows of pages may begin behind a request's first page.
    kv_formats: of a pool's rows of K and V (model/kv_format.py), those that the kernels take; what the built-in ones do
        is the table's.
    """

    rounds_to_bf16_after: tuple[str, ...] = ()
    split_partials: Literal["f32", "bf16"] = "f32"
    lse_weights: Literal["f32", "bf16"] = "f32"
    lse: Literal["natural", "log2"] = "natural"
    outputs: tuple[str, ...] = OUTPUTS
    unseen_keys: Literal["nan", "finite"] = "nan"
    batch_invariant: bool = True
    bits_with_released_pages: bool = True
    traps: bool = True
    page_origin: bool = True
    kv_formats: tuple[KvFormat, ...] = (SPLIT,)

    def roundings(self, *, is_split: bool) -> int:
        """Roundings to bf16 between the weights of attention and the result's own; partial results in bf16 are one."""
        return 2 if is_split and self.split_partials == "bf16" else 1

    @property
    def rounds_norm(self) -> bool:
        """Whether prep rounds between the norm and the rotation."""
        return "norm" in self.rounds_to_bf16_after

    def stated(self) -> tuple[str, ...]:
        """Every statement that is not the default, in words, for the summary of a run."""
        default = Contract()
        said = []
        for name in self.__slots__:
            value = getattr(self, name)
            if value != getattr(default, name):
                said.append(f"{name} = {', '.join(value) if isinstance(value, tuple) else str(value).lower()}")
        return tuple(said)


STRICT = Contract()
