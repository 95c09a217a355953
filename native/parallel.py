"""Compiles the C files of an extension on all cores: setuptools alone takes them one after another."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools.command.build_ext import build_ext

__all__ = ["ParallelBuild", "compile_in_parallel"]


def compile_in_parallel(compiler: Any) -> None:
    """Makes one compiler object of setuptools work on several files at once.

    The steps are those of its own ``compile``; a compiler that lacks one of them is left as it is.
    """
    if not all(hasattr(compiler, name) for name in ("_setup_compile", "_get_cc_args", "_compile")):
        return

    def compile_all(  # noqa: PLR0917 - the order is that of the method it replaces
        sources: list[str],
        output_dir: str | None = None,
        macros: Any = None,
        include_dirs: Any = None,
        debug: bool = False,
        extra_preargs: Any = None,
        extra_postargs: Any = None,
        depends: Any = None,
    ) -> list[str]:
        macros, objects, extra_postargs, options, build = compiler._setup_compile(
            output_dir, macros, include_dirs, sources, depends, extra_postargs
        )
        arguments = compiler._get_cc_args(options, debug, extra_preargs)

        def compile_one(target: str) -> None:
            source, extension = build[target]
            compiler._compile(target, source, extension, arguments, extra_postargs, options)

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(compile_one, [target for target in objects if target in build]))
        return list(objects)

    compiler.compile = compile_all


class ParallelBuild(build_ext):
    """``build_ext`` with a parallel compiler."""

    def build_extensions(self) -> None:
        compile_in_parallel(self.compiler)
        super().build_extensions()
