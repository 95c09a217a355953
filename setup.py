"""The build: pyproject.toml holds the metadata, this file only what needs code."""

from setuptools import setup

setup(
    cffi_modules=["native/build.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
