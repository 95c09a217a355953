"""The build: pyproject.toml holds the metadata, this file only what needs code."""

import sys
from pathlib import Path

from setuptools import find_packages, setup

sys.path.insert(0, str(Path(__file__).resolve().parent / "native"))  # an isolated build does not have it

from parallel import CheckedBuild, ParallelBuild

setup(
    packages=find_packages(include=["horo", "horo.*"]),  # horo/runner is a link to runner/
    package_dir={"": "."},  # else each start of Python imports a finder for the editable install
    cmdclass={"build": CheckedBuild, "build_ext": ParallelBuild},
    cffi_modules=["native/build.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
