"""Writes environment.md from horo/_config.py: ``python docs/reference/generate_environment.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from horo._config import (
    CallVariables,
    Config,
    LaunchVariables,
    MpiVariables,
    SlurmVariables,
    TorchrunVariables,
    Variable,
    variables_of,
)
from horo._passed_over import PASSED_OVER

PAGE = Path(__file__).with_name("environment.md")

HEAD = """\
# Environment variables

<!-- Generated from horo/_config.py by docs/reference/generate_environment.py; change it there. -->

Read once, at `init()`. `HORO_X` wins over `HOROVOD_X`, which is accepted for scripts written for Horovod. An empty
value counts as not set; any other value outside the allowed range is an error that names the variable.
"""

SECTIONS: tuple[tuple[type[Any], str, str], ...] = (
    (
        Config,
        "To tune",
        "Fusion threshold, cache capacity, segment size, CPU operations, transport and sockets per peer must be equal "
        "on all ranks.",
    ),
    (LaunchVariables, "Set by `hororun`", "Scripts may read them. Do not set them by hand."),
    (CallVariables, "Set by `horo.run`", "For the ranks that it starts."),
    (
        TorchrunVariables,
        "Set by `torchrun`",
        "Read where `hororun`'s are absent. The job meets in torch's store, which asks nobody for a password: whoever "
        "can reach it can join the job, as with `torch.distributed` itself, unless `HORO_SECRET` is set on all nodes.",
    ),
    (
        MpiVariables,
        "Set by `mpirun`, `mpiexec` and `srun --mpi=...`",
        "Read where both of the above are absent: whether MPI has to be asked. Rank and size then come from MPI.",
    ),
    (
        SlurmVariables,
        "Set by `srun`",
        "Read where all of the above are absent, or where `HORO_CONTROLLER` says so. In a batch script or a shell "
        "inside an allocation, outside of `srun`, they do not make a process one of several.",
    ),
)

PASSED = """
## Horovod's variables that do nothing

Rank 0 warns of those that are set, unless to 0.

| variable | because |
|---|---|
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for group, title, remark in SECTIONS:
        parts.append(f"\n## {title}\n\n{remark}\n\n| variable | allowed | default | meaning |\n|---|---|---|---|\n")
        parts += [_row(variable) for variable in variables_of(group).values()]
    parts.append(PASSED)
    parts += [f"| `{name}` | {why} |\n" for name, why in PASSED_OVER.items()]
    return "".join(parts)


def _row(variable: Variable) -> str:
    names = "<br>".join(f"`{name}`" for name in variable.names)
    default = "not set" if variable.default is None else _shown(variable.default)
    return f"| {names} | {variable.allowed()} | {default} | {variable.meaning} |\n"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        value = int(value)
    return f"`{value:.15g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
