"""Builds what of the package is machine code; pyproject.toml says all else.

Two things: the native engine of the emulated device, and the stand-in for libcudart that other libraries find in
its place.

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
STAND_IN = "g4kv_cli/providers/cudart"


def load_build(folder: str) -> ModuleType:
    """A build file of the package's own; the package cannot be imported here, its dependencies are not installed."""
    name = folder.replace("/", "_") + "_build"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / folder / "build.py")
    if spec is None or spec.loader is None:
        raise CompileError(f"{folder}/build.py is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


BUILD = load_build(ENGINE)
STAND_IN_BUILD = load_build(STAND_IN)


LIBRARIES = {
    "g4kv_cli.device.emulated.engine.engine": BUILD.LIBRARY,
    **{f"g4kv_cli.providers.cudart.{soname.replace('.', '_')}": soname for soname in STAND_IN_BUILD.SONAMES},
}
"""File names by the names of the extensions: none is a module of Python's."""
FILE_NAMES = {name.rpartition(".")[2]: file for name, file in LIBRARIES.items()}


class BuildLibraries(build_ext):
    """Compiles with the package's own flags instead of Python's compiler, the libraries side by side."""

    def finalize_options(self) -> None:
        """A compiler's run takes one core."""
        super().finalize_options()
        self.parallel = self.parallel or True

    def build_extension(self, ext: Extension) -> None:
        """Build one library; CompileError is only a warning, for the extensions are optional."""
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            if target.name == BUILD.LIBRARY:
                BUILD.build(target)
            else:
                STAND_IN_BUILD.build(target)
        except BUILD.BuildError as error:
            raise CompileError(f"{error}; kernels will run on the interpreter, which is slower") from error
        except STAND_IN_BUILD.BuildError as error:
            raise CompileError(f"{error}; engines' libraries will run on a GPU only") from error

    def get_ext_filename(self, fullname: str) -> str:
        """No tag of a Python version in the name."""
        *package, name = fullname.split(".")
        return str(Path(*package) / FILE_NAMES[name])


class PlatformWheel(bdist_wheel):
    """A wheel of one platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-PLATFORM."""
        return "py3", "none", super().get_tag()[2]


def extension(name: str, folder: str, headers: str) -> Extension:
    """A library out of the C files of a folder."""
    place = Path(folder)
    return Extension(
        name,
        sorted(str(path) for path in place.glob("*.c")),
        depends=sorted(str(path) for path in place.glob(headers)),
        optional=True,
    )


setup(
    ext_modules=[
        extension(name, STAND_IN if "cudart" in name else f"{ENGINE}/c", "*.inc" if "cudart" in name else "*.h")
        for name in LIBRARIES
    ],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
)
