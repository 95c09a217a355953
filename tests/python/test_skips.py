"""A reader of a run learns which command makes the skipped tests run."""

from __future__ import annotations

from skips import ways_to_run

REASONS = [
    *["no cluster: ip, sshd are not installed (`apt install iproute2 openssh-server`)"] * 3,
    "no Slurm: srun is not installed (`apt install slurm-client`)",
    *["no openmpi: build/mpi/openmpi is not there (`make test-mpi` makes it)"] * 6,
    "need --with-mpi option to run",
    "making network namespaces needs root",
    "this machine has no avx512",
]


def test_each_way_is_one_line_with_the_number_of_its_tests() -> None:
    assert ways_to_run(REASONS) == [
        "    7 tests: make test-mpi",
        "    4 tests: apt install iproute2 openssh-server slurm-client",
        "    1 test:  as root, on a machine or in a container that may make network namespaces",
        "    1 test:  not on this machine, or not in this kind of run: the reasons are above",
    ]
