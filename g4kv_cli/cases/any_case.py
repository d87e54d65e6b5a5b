"""The kinds of case that smoke runs, and how each is run."""

from __future__ import annotations

from typing import TypeAlias

from g4kv_cli.cases.attention.case import AttentionCase
from g4kv_cli.cases.attention.run import run_attention_case
from g4kv_cli.cases.e2e.any_case import EndToEndCase, run_end_to_end
from g4kv_cli.cases.prep.case import Case
from g4kv_cli.cases.prep.run import run_case
from g4kv_cli.cases.serve.run import run_serve_case
from g4kv_cli.cases.serve.table import ServeCase
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.entries.table import entries, entry_named, sources_of
from g4kv_cli.records.run import CaseResult

SmokeCase: TypeAlias = Case | AttentionCase | ServeCase | EndToEndCase


def run_any(case: SmokeCase, library: KernelLibrary, rerun: str) -> CaseResult:
    """Run a case of any kind."""
    if isinstance(case, Case):
        return run_case(case, library, rerun)
    if isinstance(case, ServeCase):
        return run_serve_case(case, library, rerun)
    if isinstance(case, AttentionCase):
        return run_attention_case(case, library, rerun)
    return run_end_to_end(case, library, rerun)


def sources_of_case(case: SmokeCase) -> tuple[str, ...]:
    """The kernel sources that a case may launch from: a run of many entries, of all of them."""
    return sources_of([entry_named(case.entry)] if isinstance(case, Case | AttentionCase) else entries())
