"""Where and with what a run is made."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from g4kv_cli import __version__
from g4kv_cli.compiler.sources import kernels_digest
from g4kv_cli.compiler.toolkit import nvrtc_version
from g4kv_cli.device.interface import Device
from g4kv_cli.entries.table import entries, sources_of
from g4kv_cli.providers.load import load_providers
from g4kv_cli.records.run import RunInfo

_PACKAGES = ("numpy", "ml_dtypes", "cuda-core", "cuda-bindings")


def collect_run_info(
    device: Device, kernels_directory: Path | None, seed: int, providers: Sequence[Path] = ()
) -> RunInfo:
    """The record's head. Raises CompileError if there is no NVRTC."""
    versions = {"g4kv": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    loaded = load_providers(providers)
    # What a record's digest stands for: the translation units whose kernels the cases launch, or the manifests.
    digest = loaded.digest if loaded else kernels_digest(sources_of(entries()), kernels_directory)
    return RunInfo(
        device=device.info,
        nvrtc=nvrtc_version(),
        kernels_digest=digest,
        kernels_directory="" if kernels_directory is None else str(kernels_directory),
        git_commit=_git_commit(),
        versions=versions,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        seed=seed,
        provider="" if loaded is None else loaded.name,
        waivers=() if loaded is None else loaded.waivers,
        declared=() if loaded is None else loaded.declared,
    )


def _git_commit() -> str:
    """The checkout's commit, with ``-dirty`` where tracked files differ; empty where this is no checkout.

    G4KV_GIT_COMMIT says it for a copy of a checkout that has no .git.
    """
    stated = os.environ.get("G4KV_GIT_COMMIT", "")
    if stated:
        return stated
    here = Path(__file__).resolve().parent.parent
    if not (here.parent / ".git").exists():
        return ""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD")
        return f"{commit}-dirty" if commit and git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.TimeoutExpired):
        return ""
