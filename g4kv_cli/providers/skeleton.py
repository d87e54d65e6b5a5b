"""The beginning of a manifest for a library: its C functions, its kernels and their parameters, what to fill in."""

from __future__ import annotations

from pathlib import Path

from g4kv_cli.device.emulated import EmulatorError
from g4kv_cli.device.emulated.ptx.parse import parse_module, parse_parameters
from g4kv_cli.entries.table import entries
from g4kv_cli.errors import G4kvError
from g4kv_cli.providers.cudart.library import ptx_of_libraries, read_library

_COMPILERS_OWN = ("_Z", "__", "_init", "_fini")


def skeleton_of(library: Path) -> str:
    """TOML text. Raises UsageError for a file that is no shared library."""
    facts = read_library(library)
    of_c = [name for name in facts.functions if not name.startswith(_COMPILERS_OWN)]
    kernels = _kernels(library)
    of_kernels = {line.partition("(")[0] for line in kernels}
    named = [name for name in facts.cxx_functions if name not in of_kernels]
    cxx = ["# C++ functions, which 'call' takes by these names:", *(f"#   {name}" for name in named)] if named else []
    functions = of_c or named
    lines = [
        "# What begins with # is to be decided; docs/providers.md has every field and name.",
        f'provider = "{library.stem.removeprefix("lib")}"',
        "",
        "[image.engine]",
        f'library = "{library.name}"    # beside this file',
        '# last_error = "a function that returns the text of a refusal"',
        "",
        f"# C functions of {library.name}:",
        *(f"#   {name}" for name in of_c or ["none"]),
        *cxx,
        "# Kernels, with what their parameters are in PTX:",
        *(f"#   {line}" for line in kernels),
        "# Entries that can be served:",
        *(f"#   {entry.name:<66} {entry.operation}, {entry.form}" for entry in entries()),
        "",
        "[[entry]]",
        '# name = "batch_decode_paged_*"',
        "# [entry.arrays]",
        '# table = "i32 padded_rows(page_indices, page_indptr, fill=-1)"',
        "[[entry.launch]]",
        'image = "engine"',
        f'call = "{functions[0] if functions else ""}"',
        '# arguments = ["ptr q", "ptr pool + 2 * k_offset", "ptr pool + 2 * v_offset", "i32 tokens", "f32 sm_scale"]',
    ]
    return "\n".join(lines) + "\n"


def _kernels(library: Path) -> list[str]:
    try:
        modules = [parse_module(text) for text in ptx_of_libraries(library)]
    except (G4kvError, EmulatorError) as error:
        return [f"unknown: {error}"]
    lines = []
    for module in modules:
        for name in module.bodies:
            kinds = [
                f"struct of {parameter.nbytes} bytes" if parameter.is_array else parameter.kind
                for parameter in parse_parameters(module.bodies[name][0], 1)
            ]
            lines.append(f"{name}({', '.join(kinds)})")
    return list(dict.fromkeys(lines)) or ["none"]
