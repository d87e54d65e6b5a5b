"""Reads the [pool] of a manifest: the table that ``g4kv layout --pool`` takes, or pieces of axes, or K and V apart."""

from __future__ import annotations

from typing import get_args

from g4kv_cli.errors import UsageError
from g4kv_cli.model.kv_layout import BF16_BYTES
from g4kv_cli.model.pool_layout import OffsetType, PoolDescription, described_pool
from g4kv_cli.model.pool_order import OWN_ORDER, PoolOrder
from g4kv_cli.providers.pool_form import PartForm, PartName, PoolForm
from g4kv_cli.providers.schema import Table


def read_pool(root: Table) -> tuple[PoolOrder, PoolForm | None, PoolDescription | None]:
    """(the order of axes that calls have, the form that kernels get where no order is that, the pool as it is drawn).

    Raises UsageError with file, line and key.
    """
    table = root.table("pool")
    if table is None:
        return OWN_ORDER, None, PoolDescription(f"{root.document.file}", OWN_ORDER, is_apart=False)
    if "k" in table or "v" in table:
        parts = tuple(_part(table, name) for name in ("k", "v"))
        table.finish()
        return OWN_ORDER, PoolForm(parts), None
    axes = table.text("axes")
    if "/" in axes or "%" in axes or axes.split()[-1:] != ["dim"]:
        form = PoolForm((_of_table(table, "pool"),))
        table.finish()
        return OWN_ORDER, form, None
    pool = described_pool(table)
    for key, value in (("page_size", pool.page_size), ("num_layers", pool.num_layers), ("num_pages", pool.num_pages)):
        if value is not None:
            words = "is the case's in a manifest; state what the kernels need as only_if"
            raise table.error(key, f'{words}: only_if = {{ "{key} == {value}" = "..." }}')
    if pool.element_bytes != BF16_BYTES:
        raise table.error("element_bytes", "must be 2: the pools of a call are bfloat16")
    if not (pool.strides or pool.alignment_bytes or pool.offsets != "int64"):
        return pool.order, None, pool
    part = PartForm.parse("pool", axes, pool.strides, pool.offsets, pool.alignment_bytes)
    return OWN_ORDER, PoolForm((part,)), pool


def _part(parent: Table, key: str) -> PartForm:
    table = parent.table(key)
    if table is None:
        raise parent.error(
            "kv".replace(key, ""), f"is alone: [pool.k] and [pool.v] go together, and {key} is not there"
        )
    part = _of_table(table, f"{key}_pool")  # type: ignore[arg-type]
    table.finish()
    return part


def _of_table(table: Table, name: PartName) -> PartForm:
    strides = table.mapping("strides", lambda inner, key: inner.integer(key, low=1, high=1 << 62))
    offsets: OffsetType = table.text("offsets", "int64", get_args(OffsetType))  # type: ignore[assignment]
    alignment = table.integer("alignment", 0, low=0, high=1 << 20)
    try:
        return PartForm.parse(name, table.text("axes"), strides, offsets, alignment)
    except UsageError as error:
        raise table.error("axes", str(error)) from error
