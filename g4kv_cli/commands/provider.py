"""``g4kv provider``: look at a manifest before it is run, and begin one for a library."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from g4kv_cli.commands.options import ProviderFile
from g4kv_cli.errors import EXIT_FAILURE
from g4kv_cli.providers.check import check_manifest
from g4kv_cli.providers.read import read_manifest
from g4kv_cli.providers.skeleton import skeleton_of
from g4kv_cli.records.files import write_new
from g4kv_cli.report.provider import write_check

_existing = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def provider() -> None:
    """Manifests of other people's kernels, which g4kv smoke --provider runs (docs/providers.md)."""


@provider.command()
@click.argument("file", type=ProviderFile(), metavar="FILE.toml|NAME")
def check(file: Path) -> int:
    """Say which entries a manifest serves, and what in it cannot work. Nothing is run.

    Exit codes: 0 nothing was found; 2 something in it cannot work.
    """
    manifest = read_manifest(file)
    found = check_manifest(manifest)
    write_check(manifest.name, file, manifest.contract.stated(), found)
    return EXIT_FAILURE if found.problems else 0


@provider.command(short_help="Begin a manifest for an engine's library.")
@click.option("--library", type=_existing, required=True, metavar="LIBRARY.so", help="An engine's shared library.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="[default: stdout]")
def init(library: Path, output: Path | None) -> int:
    """Begin a manifest: the library's C functions, its kernels and their parameters, and what to fill in."""
    text = skeleton_of(library)
    if output is None:
        sys.stdout.write(text)
        return 0
    write_new(output, text, "--output")  # never over somebody's work
    return 0
