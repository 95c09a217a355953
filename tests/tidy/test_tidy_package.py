"""What is installed: one abi3 extension that exports little and needs only libc, from a source archive that builds."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from skips import apt_install, no_compiler
from tidy_files import ROOT, below

sys.path.insert(0, str(ROOT / "native"))
from parallel import leave_out_library_paths

import build as native_build

# cffi writes its own tables; __cpu_* is gcc's note of what the processor can do; the others belong to the C runtime.
# Those of native/python are Python's, which takes no constants.
_KNOWN_VARIABLES = re.compile(
    r"_cffi_\w+|__cpu_\w+|completed\.\d+|__dso_handle|__TMC_END__|_edata|_end|__bss_start|__data_start"
    r"|(?:slot|caller|gradient|ready|numbers)_\w+"
)
_LIBRARIES = re.compile(r"libc\.so\.\d+|libpthread\.so\.\d+|libdl\.so\.\d+|ld-linux[\w-]*\.so\.\d+|libm\.so\.\d+")


def mutable_variables(sections: str, symbols: str) -> list[str]:
    """Names of variables in writable sections, from ``readelf -SW`` and ``readelf -sW``; .data.rel.ro is constant."""
    names = dict(re.findall(r"^\s*\[\s*(\d+)\]\s+(\S+)", sections, flags=re.MULTILINE))
    rows = re.findall(r"^\s*\d+:\s+\w+\s+\w+\s+(?:OBJECT|TLS)\s+\w+\s+\w+\s+(\d+)\s+(\S+)", symbols, flags=re.MULTILINE)
    if not rows:
        raise ValueError("the extension has no symbols of variables; it was stripped and cannot be judged")
    writable = re.compile(r"\.(data|bss|tdata|tbss)(\.(?!rel\.ro)\S+)?$")
    return [
        name for index, name in rows if writable.match(names.get(index, "")) and not _KNOWN_VARIABLES.fullmatch(name)
    ]


def stray_exports(dynamic_symbols: str, header: str) -> list[str]:
    """What the extension exports beyond its init functions and the functions of horo.h (``readelf --dyn-syms -W``)."""
    pattern = r"^\s*\d+:\s+\w+\s+\w+\s+\w+\s+(?:GLOBAL|WEAK|UNIQUE)\s+DEFAULT\s+(\d+)\s+(\S+)"
    exported = {name for _, name in re.findall(pattern, dynamic_symbols, flags=re.MULTILINE)}
    public = set(re.findall(r"^HORO_API\b[^;(]*?(\w+)\(", header, flags=re.MULTILINE))
    if not public:
        raise ValueError("found no HORO_API function in the header")
    return sorted(exported - public - {"PyInit__native", "PyInit__calls"})


def foreign_libraries(dynamic_section: str) -> list[str]:
    """The libraries beyond libc that the extension needs (``readelf -dW``)."""
    needed = re.findall(r"\(NEEDED\)[^\[]*\[([^\]]+)\]", dynamic_section)
    return [name for name in needed if not _LIBRARIES.fullmatch(name)]


def unhardened(dynamic_section: str, program_headers: str, dynamic_symbols: str) -> list[str]:
    """What the extension lacks of protection (``readelf -dW``, ``-lW`` and ``--dyn-syms -W``)."""
    checked = set(re.findall(r"\sUND\s+(__\w+_chk|__stack_chk_fail)\b", dynamic_symbols))
    stack = re.search(r"GNU_STACK\s.*\s(R?W?E?)\s+0x", program_headers)
    lacks = {
        "a stack protector": "__stack_chk_fail" not in checked,
        "checked calls of libc (FORTIFY)": not checked - {"__stack_chk_fail"},
        "BIND_NOW": not re.search(r"\((FLAGS\).*BIND_NOW|FLAGS_1\).*\bNOW)\b", dynamic_section),
        "RELRO": "GNU_RELRO" not in program_headers,
        "a stack without code": stack is None or "E" in stack[1],
        "no path to libraries": bool(re.search(r"\((RPATH|RUNPATH)\)", dynamic_section)),
    }
    return [what for what, is_lacking in lacks.items() if is_lacking]


def unresolved(dynamic_symbols: str) -> list[str]:
    """Functions of ours that are used but defined nowhere; the linker lets them pass in a shared library."""
    return re.findall(r"^\s*\d+:.*\sUND\s+((?:hr|horo)_\w+)", dynamic_symbols, flags=re.MULTILINE)


FOLDERS = ("horo", "native")
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive and the wheel of ``--built``; without it, those made from a clean copy."""
    built = request.config.getoption("--built", default=None)
    if built is not None:
        return _only(built.resolve(), "*.tar.gz"), _only(built.resolve(), "*.whl")
    if os.environ.get("HORO_ALL_CASES") != "1":
        pytest.skip("compiles the core twice (`make wheel`)")
    if reason := no_compiler():
        pytest.skip(reason)
    clean = tmp_path_factory.mktemp("clean")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, clean / folder, ignore=shutil.ignore_patterns("*.so", "*.o", "__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, clean)
    out = tmp_path_factory.mktemp("out")
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    _run([sys.executable, "-c", build, str(out)], clean)
    archive = _only(out, "*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    _run([*pip, "--wheel-dir", str(out), str(archive)], out)
    return archive, _only(out, "*.whl")


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    assert len(found) == 1, f"{pattern} in {folder}: {found}"
    return found[0]


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def extension(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    with zipfile.ZipFile(built[1]) as wheel:
        return Path(wheel.extract("horo/_native.abi3.so", tmp_path_factory.mktemp("extension")))


def readelf(option: str, path: Path) -> str:
    if reason := apt_install({"readelf": "binutils"}):
        pytest.skip(reason)
    return _run(["readelf", option, "-W", str(path)], path.parent)


def test_source_archive_has_all_sources_and_the_abi3_wheel_all_modules(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = {str(path.relative_to(ROOT)) for path in below("native", suffixes=(".c", ".h", ".py"))}
    assert wanted - names == set()
    assert "-cp310-abi3-linux_" in built[1].name
    with zipfile.ZipFile(built[1]) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    modules = {str(path.relative_to(ROOT)) for path in below("horo", suffixes=(".py", ".typed"))}
    modules |= {f"horo/{path.relative_to(ROOT)}" for path in below("runner", suffixes=(".py",))}
    assert sorted(names) == sorted(modules | {"horo/_native.abi3.so", "horo/hororun.md", "horo/py.typed"})


def test_without_a_compiler_the_build_ends_with_a_sentence(built: tuple[Path, Path], tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(tmp_path)]
    environment = {**os.environ, "CC": "no-such-compiler -O2"}
    done = subprocess.run(
        [*pip, str(built[0])], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode != 0
    said = done.stderr.partition("lines of output]")[2].partition("[end of output]")[0].strip().splitlines()
    assert said[-1].strip().startswith("horo cannot be compiled: the C compiler 'no-such-compiler' is not there; on ")
    assert len(said) <= 3


def read_protection(path: Path) -> tuple[str, str, str]:
    return readelf("-d", path), readelf("-l", path), readelf("--dyn-syms", path)


def test_the_extension_is_small_whole_and_hardened(extension: Path) -> None:
    sections, exported = readelf("-S", extension), readelf("--dyn-syms", extension)
    header = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "native" / "include").glob("*.h"))
    assert ".debug_info" not in sections
    assert mutable_variables(sections, readelf("-s", extension)) == []
    assert stray_exports(exported, header) == []
    assert unresolved(exported) == []
    assert foreign_libraries(readelf("-d", extension)) == []
    assert unhardened(*read_protection(extension)) == []


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("gcc -shared -L/a/lib -Wl,-rpath,/a/lib -Wl,--rpath=/b -Wl,-R/c", "gcc -shared -L/a/lib"),
        ("gcc -Wl,-rpath -Wl,/a/lib -Wl,-rpath-link,/b -Wl,-z,now", "gcc -Wl,-rpath-link,/b -Wl,-z,now"),
        ("gcc -shared", "gcc -shared"),
    ],
)
def test_the_linker_gets_no_paths_to_libraries(words: str, kept: str) -> None:
    compiler = SimpleNamespace(linker_so=words.split())
    leave_out_library_paths(compiler)
    assert compiler.linker_so == kept.split()


@pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())
@pytest.mark.parametrize(
    ("without", "lack"),
    [
        ("-fno-stack-protector", ["a stack protector"]), ("-U_FORTIFY_SOURCE", ["checked calls of libc (FORTIFY)"]),
        ("-Wl,-z,lazy", ["BIND_NOW"]), ("-Wl,-z,norelro", ["RELRO"]), ("-Wl,-z,execstack", ["a stack without code"]),
        ("-Wl,-rpath,/a", ["no path to libraries"]),
    ],
)  # fmt: skip
def test_each_lack_of_protection_is_found(tmp_path: Path, without: str, lack: list[str]) -> None:
    source, library = tmp_path / "one.c", tmp_path / "one.so"
    source.write_text(
        "#include <string.h>\n#include <stdio.h>\n"
        "int one(const char *text) { char kept[8]; strcpy(kept, text); return puts(kept); }\n"
    )
    flags = ["-O2", *native_build.HARDENING_FLAGS, *native_build.HARDENING_LINK_FLAGS, without]
    _run(["cc", "-shared", "-fPIC", *flags, "-o", str(library), str(source)], tmp_path)
    assert unhardened(*read_protection(library)) == lack


@pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())
def test_binary_checks_find_a_bad_library(tmp_path: Path) -> None:
    source = tmp_path / "bad.c"
    source.write_text(
        "int hr_gone(void); int hr_counter = 3; static int hits;\n"
        "int stray(void) { return hr_gone() + hr_counter + hits++; }\n"
    )
    library = tmp_path / "bad.so"
    _run(["cc", "-shared", "-fPIC", "-O0", "-Wl,--no-as-needed", "-lgcc_s", "-o", str(library), str(source)], tmp_path)
    header = "HORO_API int horo_wanted(void);\n"
    assert set(mutable_variables(readelf("-S", library), readelf("-s", library))) == {"hr_counter", "hits"}
    assert {"stray", "hr_counter"} <= set(stray_exports(readelf("--dyn-syms", library), header))
    assert unresolved(readelf("--dyn-syms", library)) == ["hr_gone"]
    assert foreign_libraries(readelf("-d", library)) == ["libgcc_s.so.1"]
