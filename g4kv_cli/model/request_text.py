"""One request in one line, ``kv=1030 q=8 window=1024 heads=32/16 page=16 splits=4 head_dim=256``: a bug report's."""

from __future__ import annotations

import re

from g4kv_cli.errors import UsageError
from g4kv_cli.model.document import near
from g4kv_cli.model.geometry import ATTENTION_SCALE, GEOMETRIES, HEAD_DIMS, Geometry, select_geometries
from g4kv_cli.model.kv_layout import DEFAULT_PAGE_SIZE_TOKENS, INT32_MAX, MAX_PAGE_SIZE_TOKENS
from g4kv_cli.model.workload import (
    DEFAULT_SPLITS,
    MAX_REQUESTS,
    MAX_SPLITS,
    PAGE_RULES,
    RequestSpec,
    Workload,
    WorkloadSpec,
    lay_out,
)
from g4kv_cli.model.workload_geometry import changed_geometry

KEYS = {
    "kv": "keys of the request, its new tokens included (needed)",
    "q": "its new tokens; 1",
    "window": "keys that a query sees, itself included, or none; the geometry's",
    "heads": "query heads/KV heads; the geometry's",
    "head_dim": "256 or 512; the geometry's",
    "page": "tokens of a page; 16",
    "splits": "of the keys in split decode, several with commas; 3",
    "origin": "the first page that is still there; what a server keeps",
    "pages": "contiguous, permuted, or page ids with commas; permuted",
    "seed": "of permuted pages; 0",
    "batch": "so many such requests; 1",
    "padding": "so many padding rows behind them; 0",
    "layers": "of the pool, the last one is used; 2, of a large pool 1",
    "scale": "sm_scale; 1",
    "k_eq_v": "yes or no: V is made from the raw K; the geometry's",
}
"""Every key and what it means, with what stands for it where it is left out."""
DEFAULT_GEOMETRIES = {256: "12b-local", 512: "12b-global"}
_FIELDS = {
    "num_kv_heads": "heads", "num_qo_heads": "heads", "kv_len": "kv", "q_len": "q", "page_origin": "origin",
    "num_layers": "layers", "num_pages": "pages", "requests": "q", "max_positions": "kv",
}  # fmt: skip
_PAIR = re.compile(r"(\w+)=(\S+)")


def read_request(text: str, geometry: str | None = None, tp: int = 1) -> tuple[WorkloadSpec, list[Workload]]:
    """The workload of one line on the geometry that it describes. Raises UsageError that names the key."""
    line = _Line(text)
    spec = line.spec()
    return spec, [lay_out(spec, line.geometry(geometry, tp))]


class _Line:
    """The keys of a line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.values: dict[str, str] = {}
        for word in text.split():
            pair = _PAIR.fullmatch(word)
            if pair is None:
                raise UsageError(f"--shape {text!r}: {word!r} is no key=value; write kv=1030 q=8 window=1024")
            key, value = pair[1], pair[2]
            if key not in KEYS:
                raise self.fault(key, f"is no key{near(key, KEYS)}; the keys are {', '.join(KEYS)}")
            if key in self.values:
                raise self.fault(key, "stands twice")
            self.values[key] = value

    def fault(self, key: str, words: str) -> UsageError:
        """An error at a key, or at what stands for a field."""
        name = _FIELDS.get(key, key)
        return UsageError(f"--shape {self.text!r}: {'pages' if name.startswith('pages[') else name}: {words}")

    def integer(self, key: str, default: int | None, *, low: int, high: int) -> int:
        """An integer of a key; None: it has to be there."""
        if key not in self.values and default is not None:
            return default
        return self._number(key, self.values.get(key, ""), low, high)

    def integers(self, key: str, *, low: int, high: int) -> tuple[int, ...]:
        """Integers with commas."""
        return tuple(self._number(key, part, low, high) for part in self.values[key].split(","))

    def spec(self) -> WorkloadSpec:
        """The request."""
        kv_len = self.integer("kv", None, low=1, high=INT32_MAX)
        q_len = self.integer("q", 1, low=1, high=kv_len)
        page_size = self.integer("page", DEFAULT_PAGE_SIZE_TOKENS, low=1, high=MAX_PAGE_SIZE_TOKENS)
        batch = self.integer("batch", 1, low=1, high=MAX_REQUESTS)
        pages = self.values.get("pages", "permuted")
        row = pages if pages in PAGE_RULES else self.integers("pages", low=0, high=INT32_MAX - 1)
        if batch > 1 and isinstance(row, tuple):
            raise self.fault("pages", "several requests cannot have the same pages: give a rule")
        origin = self.integer("origin", None, low=0, high=INT32_MAX) if "origin" in self.values else None
        splits = self.integers("splits", low=1, high=MAX_SPLITS) if "splits" in self.values else DEFAULT_SPLITS
        name = "-".join(f"{key}{value.replace(',', '+').replace('/', '-')}" for key, value in self.values.items()
                        if key not in ("window", "heads", "head_dim", "k_eq_v"))  # fmt: skip
        return WorkloadSpec(
            name=name,
            requests=(RequestSpec(kv_len, q_len, row, origin, self.fault),) * batch,
            page_size=page_size,
            splits=tuple(dict.fromkeys(splits)),
            padding=self.integer("padding", 0, low=0, high=MAX_REQUESTS),
            released=True,
            page_seed=self.integer("seed", 0, low=0, high=INT32_MAX),
            num_pages=None,
            num_layers=self.integer("layers", None, low=1, high=1024) if "layers" in self.values else None,
            sm_scale=self._scale(),
            values={"shape": self.text},
            fault=self.fault,
        )

    def geometry(self, names: str | None, tp: int) -> Geometry:
        """The geometry that the line describes: a given or usual one, with its own numbers in place of that one's."""
        head_dim = self.integer("head_dim", None, low=1, high=INT32_MAX) if "head_dim" in self.values else None
        if names is None:
            base = GEOMETRIES[DEFAULT_GEOMETRIES.get(head_dim or HEAD_DIMS[0], DEFAULT_GEOMETRIES[HEAD_DIMS[0]])]
            base = base.for_rank(tp)
        else:
            found = select_geometries(names, tp)
            if len(found) != 1:
                text = ", ".join(one.name for one in found)
                raise UsageError(f"--shape goes with one geometry, and --geometry {names} means {text}: name one")
            base = found[0]
        window: int | str | None = "own"
        if self.values.get("window") == "none":
            window = None
        elif "window" in self.values:
            window = self.integer("window", None, low=1, high=INT32_MAX)
        return changed_geometry(
            base,
            self.fault,
            heads=self._heads(),
            head_dim=head_dim,
            window=window,  # type: ignore[arg-type]
            k_eq_v=self._choice("k_eq_v", {"yes": True, "no": False}),
        )

    def _heads(self) -> tuple[int, int] | None:
        if "heads" not in self.values:
            return None
        parts = self.values["heads"].split("/")
        if len(parts) != 2:
            raise self.fault("heads", f"{self.values['heads']!r} must be query heads/KV heads, such as 32/16")
        queries, kv_heads = (self._number("heads", part, 1, INT32_MAX) for part in parts)
        return queries, kv_heads

    def _choice(self, key: str, values: dict[str, bool]) -> bool | None:
        if key not in self.values:
            return None
        if self.values[key] not in values:
            raise self.fault(key, f"must be {' or '.join(values)}, got {self.values[key]!r}")
        return values[self.values[key]]

    def _scale(self) -> float:
        text = self.values.get("scale", str(ATTENTION_SCALE))
        try:
            scale = float(text)
        except ValueError:
            scale = -1.0
        if not 0 < scale < float("inf"):
            raise self.fault("scale", f"must be a finite number above 0, got {text!r}")
        return scale

    def _number(self, key: str, text: str, low: int, high: int) -> int:
        if not re.fullmatch(r"\d{1,18}", text):
            given = f"got {text!r}" if text else "it is not given"
            raise self.fault(key, f"must be an integer from {low} to {high}, {given}")
        if not low <= int(text) <= high:
            raise self.fault(key, f"must be from {low} to {high}, got {text}")
        return int(text)
