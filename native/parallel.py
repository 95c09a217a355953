"""The way the extension is compiled: on all cores, after a look at what compiling needs, without debugging symbols."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

__all__ = ["CheckedBuild", "ParallelBuild", "compile_in_parallel", "leave_out_library_paths", "what_is_missing"]


def what_is_missing() -> str:
    """The reason why nothing can be compiled here, with what to install; empty: all is there."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        return f"the C compiler '{compiler}' is not there; on Debian: apt-get install gcc libc6-dev"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return f"{header} is not there; on Debian: apt-get install python3-dev"
    return ""


def _check() -> None:
    missing = what_is_missing()
    if missing:
        raise SystemExit(f"horo cannot be compiled: {missing}")


class CheckedBuild(build):
    """``build`` that says what is missing before it copies a hundred files."""

    def run(self) -> None:
        _check()
        super().run()


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


def leave_out_library_paths(compiler: Any) -> None:
    """Takes from the linker's command the folder of Python's own libraries, which many Pythons have put into it.

    The extension needs libc only, and would look for that in a folder that others may own where it is installed.
    """
    kept: list[str] = []
    follows = False
    for word in getattr(compiler, "linker_so", ()):
        if not follows and not re.match(r"-Wl,(-R|--?rpath(,|=|$))", word):
            kept.append(word)
        follows = not follows and bool(re.fullmatch(r"-Wl,(-R|--?rpath)", word))  # its folder is the next word
    if kept:
        compiler.linker_so = kept


class ParallelBuild(build_ext):
    """``build_ext`` with a parallel compiler. Symbols for a debugger stay where a checkout is built for itself."""

    def run(self) -> None:
        _check()
        super().run()

    def build_extensions(self) -> None:
        compile_in_parallel(self.compiler)
        leave_out_library_paths(self.compiler)
        if not (self.inplace or getattr(self, "editable_mode", False)):
            for extension in self.extensions:
                extension.extra_link_args.append("-Wl,--strip-debug")
        super().build_extensions()
