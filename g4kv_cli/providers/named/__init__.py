"""Manifests that come with g4kv, by name: libraries that ``--provider NAME`` runs where they are installed."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


def named_providers() -> dict[str, Path]:
    """Each manifest by its name."""
    return {file.stem: file for file in sorted(_FOLDER.glob("*.toml"))}


def provider_file(word: str) -> Path:
    """The manifest that is meant: a file that there is, or else one of a name."""
    file = Path(word)
    return file if file.exists() else named_providers().get(word, file)


def provider_word(file: Path) -> str:
    """What ``provider_file`` takes for it."""
    return file.stem if file.parent == _FOLDER else str(file)
