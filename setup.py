"""Builds the native engine of the emulated device with the package; pyproject.toml says all else.

The engine is a plain shared library, not an extension module of Python, so a wheel serves every Python of its platform.
Where it cannot be built the package is installed without it, and kernels run on the interpreter.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ENGINE = "g4kv_cli/device/emulated/engine"


def load_build() -> ModuleType:
    """The engine's own build file; the package cannot be imported here, its dependencies are not installed."""
    spec = importlib.util.spec_from_file_location("engine_build", Path(__file__).parent / ENGINE / "build.py")
    if spec is None or spec.loader is None:
        raise CompileError(f"{ENGINE}/build.py is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


BUILD = load_build()


class BuildEngine(build_ext):
    """Compiles the engine with its own flags instead of Python's compiler."""

    def build_extension(self, ext: Extension) -> None:
        """Build one library; CompileError is only a warning, for the extension is optional."""
        try:
            BUILD.build(Path(self.get_ext_fullpath(ext.name)))
        except BUILD.BuildError as error:
            raise CompileError(f"{error}; kernels will run on the interpreter, which is slower") from error

    def get_ext_filename(self, fullname: str) -> str:
        """No tag of a Python version in the name."""
        return str(Path(*fullname.split(".")[:-1]) / BUILD.LIBRARY)


class PlatformWheel(bdist_wheel):
    """A wheel of one platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-PLATFORM."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "g4kv_cli.device.emulated.engine.engine",
            sorted(str(path) for path in Path(ENGINE, "c").glob("*.c")),
            depends=sorted(str(path) for path in Path(ENGINE, "c").glob("*.h")),
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildEngine, "bdist_wheel": PlatformWheel},
)
