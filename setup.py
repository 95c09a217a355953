"""The build: pyproject.toml holds the metadata, this file only what needs code."""

from setuptools import find_packages, setup

# runner/ is installed as horo.runner: the launcher lives beside the library, not inside it.
packages = find_packages(include=["horo", "horo.*"])
packages += ["horo.runner", *(f"horo.runner.{name}" for name in find_packages("runner"))]

setup(
    packages=packages,
    package_dir={"horo.runner": "runner"},
    cffi_modules=["native/build.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
