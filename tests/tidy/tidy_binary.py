"""Rules for the built extension, from the output of readelf (it comes with the compiler)."""

import re

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
