"""Compiles the CPU kernels while nanoserve is installed. Everything else about the package is in pyproject.toml.

They are optional: without a C++ compiler the installation succeeds, and nanoserve computes with torch alone.
"""

import os
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_FOLDER = Path("nanoserve/model/kernels/native")
_BUILD = runpy.run_path(str(_FOLDER / "build.py"))


class BuildKernels(build_ext):
    """One shared object a level, by the command that ``build.py`` gives."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # loaded by ctypes, so any Python can use it

    def build_extension(self, ext: Extension) -> None:
        why = _BUILD["compile_level"](ext.name.rpartition("_")[2], Path(self.get_ext_fullpath(ext.name)))
        if why:
            self.warn(f"CPU kernels {ext.name} are left out ({why}); without any, torch computes several times slower")


setup(
    ext_modules=[
        Extension(f"nanoserve.model.kernels.native.cpu_{level}", sources=[str(_FOLDER / "cpu.cpp")], optional=True)
        for level in _BUILD["LEVELS"]
    ],
    cmdclass={"build_ext": BuildKernels},
)
