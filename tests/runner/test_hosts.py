"""The hosts of a job: as batch systems have them, as users write them; which rank runs where, by which launcher."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parsing import parsed

from horo.runner.config import JobError
from horo.runner.hosts import HostsError, HostSpec, parse_host_file, parse_hosts
from horo.runner.job.placement import PlacementError, place
from horo.runner.start.allocation import Allocation, AllocationError, find_allocation
from horo.runner.start.launcher import allocated, choose_launcher

names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
addresses = st.ip_addresses(v=6).map(str)
users = st.none() | st.from_regex(r"[a-z_][a-z0-9_.-]{0,10}", fullmatch=True)
numbers = st.none() | st.integers(1, 65535)
hosts = st.lists(
    st.builds(HostSpec, names | addresses, users, numbers, numbers), min_size=1, unique_by=lambda h: h.name
)


def written(host: HostSpec) -> str:
    name = f"[{host.name}]" if ":" in host.name else host.name
    user = f"{host.user}@" if host.user is not None else ""
    slots = f":{host.slots}" if host.slots is not None else ""
    port = f":port={host.port}" if host.port is not None else ""
    return f"{user}{name}{slots}{port}"


@given(hosts)
def test_what_is_written_is_read(many: list[HostSpec]) -> None:
    assert parse_hosts(",".join(map(written, many))) == tuple(many)
    lines = ["# hosts", ""]
    for host in many:
        slots, port = f" slots={host.slots}" * (host.slots is not None), f" port={host.port}" * (host.port is not None)
        lines.append(f"{written(HostSpec(host.name, host.user))}{slots}{port}   # a comment")
    assert parse_host_file("\n".join(lines) + "\n", "f") == tuple(many)


@given(st.text())
def test_any_text_is_hosts_or_a_sentence(text: str) -> None:
    for read_text in (parse_hosts, lambda value: parse_host_file(value, "f")):
        try:
            assert read_text(text)
        except HostsError as error:
            assert str(error)


def test_a_host_named_twice_gets_the_sum_of_its_slots_and_a_bare_ipv6_address_is_understood() -> None:
    assert parse_hosts("h1:2,h2:1,h1:3") == (HostSpec("h1", slots=5), HostSpec("h2", slots=1))
    twice = "h1 slots=2 max_slots=4\nh1 slots=3 max_slots=6"
    assert parse_host_file(twice, "f") == (HostSpec("h1", slots=5, max_slots=10),)
    assert parse_host_file("fd00::1 slots=4\n", "f") == (HostSpec("fd00::1", slots=4),)
    with pytest.raises(HostsError, match="brackets"):
        parse_hosts("fd00::1")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("h1:0", "slots of h1, '0'"),
        ("h1:four", "slots of h1, 'four'"),
        ("h1:-1", "slots of h1, '-1'"),
        ("h1:4:4", "slots are given twice"),
        ("h1:port=0", "port of h1, '0'"),
        ("h1:port=70000", "port 70000"),
        ("h1:max=3", "max=3"),
        ("-oProxyCommand=x:1", "-oProxyCommand=x:1"),
        ("h1:1,,h2:1", "-H 'h1:1,,h2:1' has a comma without a host"),
        (",h1:1", "has a comma without a host"),
        ("h1:1,", "has a comma without a host"),
        ("h1:1,h2:0", "-H 'h1:1,h2:0': slots of h2, '0', must be a whole number from 1 on"),
        ("h1:1,h1", "h1 is named twice"),
        ("a@h1:1,b@h1:1", "h1 is named twice"),
        ("", "names no host"),
        ("h 1", "'h 1' has a space in it: write a comma between two hosts"),
        ("h1:2 h2:2", "'h1:2 h2:2' has a space in it: write a comma between two hosts"),
        ("ssh://h1:2", "'ssh://h1:2' is a URL: write the host without ssh://"),
        ("fe80::1%eth0", "is a numeric IPv6 address without brackets: write [fe80::1%eth0], or with slots [fe80::1%e"),
        ("me@::1", "write me@[::1], or with slots me@[::1]:4"),
        ("h[1-3:2", "'h[1-3:2' is not a host"),
        ("h[3-1]:2", "'3-1' in the host list 'h[3-1]' is no number or range"),
        ("h[1-999999]", "names more than 65536 hosts"),
        ("h1:3:max_slots=2", "slots of h1, 3, are more than its max_slots, 2"),
    ],
)
def test_a_wrong_host_is_named(text: str, fault: str) -> None:
    with pytest.raises(HostsError) as error:
        parse_hosts(text)
    assert fault in str(error.value)


@pytest.mark.parametrize("line", ["h2 slots", "h2 max=4", "h2 slots=x", "h2 4", "slots=4", "h!", "h2,h3", "h[3-1]"])
def test_a_wrong_line_is_named_with_its_number_and_text(line: str) -> None:
    with pytest.raises(HostsError) as error:
        parse_host_file(f"h1 slots=4\n\n{line}  # wrong\n", "some/file")
    assert "some/file, line 3" in str(error.value)
    assert line in str(error.value)


def test_brackets_of_slurm_and_files_of_pbs_open_mpi_and_windows_are_understood() -> None:
    with pytest.raises(HostsError, match="names no host"):
        parse_host_file("# nothing\n\n", "f")
    pair = (HostSpec("n09", "me", 22, 2), HostSpec("n10", "me", 22, 2))
    assert parse_hosts("me@n[09-10]:2:port=22") == pair
    assert parse_hosts("n[1,3]x,b") == (HostSpec("n1x"), HostSpec("n3x"), HostSpec("b"))
    assert parse_host_file("me@n[09-10] slots=2 port=22\n", "f") == pair
    assert parse_host_file("h1\nh1\nh2\nh1\n", "f") == (HostSpec("h1", slots=3), HostSpec("h2", slots=1))
    assert parse_host_file("h1\nh2\n", "f") == (HostSpec("h1"), HostSpec("h2"))
    with pytest.raises(HostsError, match="f, line 2, 'h1': h1 is named twice: say its slots each time"):
        parse_host_file("h1 slots=2\nh1\n", "f")
    text = "\ufeffh1 slots=2 max_slots=4\r\nh2 max-slots=3\r\n"
    assert parse_host_file(text, "f") == (HostSpec("h1", slots=2, max_slots=4), HostSpec("h2", slots=3, max_slots=3))


slot_lists = st.lists(st.integers(1, 8), min_size=1, max_size=12)


@given(slot_lists, st.data())
def test_ranks_fill_hosts_in_order_and_have_consistent_places(slots: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, sum(slots)))
    placed = place(slots, size)
    assert [slot.rank for slot in placed] == list(range(size))
    assert [slot.host for slot in placed] == sorted(slot.host for slot in placed)
    for host, available in enumerate(slots):
        local = [slot for slot in placed if slot.host == host]
        assert [slot.local_rank for slot in local] == list(range(len(local)))
        assert all(slot.local_size == len(local) for slot in local)
        assert len(local) == max(0, min(available, size - sum(slots[:host])))
    for local_rank in range(max(slots)):
        column = [slot for slot in placed if slot.local_rank == local_rank]
        assert [slot.cross_rank for slot in column] == list(range(len(column)))
        assert all(slot.cross_size == len(column) for slot in column)


@given(slot_lists, st.data())
def test_ranks_are_shared_out_evenly_as_far_as_slots_allow(slots: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, sum(slots)))
    placed = place(slots, size, evenly=True)
    counts = [sum(1 for slot in placed if slot.host == host) for host in range(len(slots))]
    assert [slot.host for slot in placed] == sorted(slot.host for slot in placed)
    assert sum(counts) == size
    for count, available in zip(counts, slots, strict=True):
        assert count <= available
        assert count in (available, max(counts), max(counts) - 1)
    assert [slot.host for slot in place([8, 8], 5, evenly=True)] == [0, 0, 0, 1, 1]


@given(slot_lists, st.integers(1, 20))
def test_too_many_ranks_are_an_error_with_both_numbers_unless_allowed(slots: list[int], more: int) -> None:
    size = sum(slots) + more
    with pytest.raises(PlacementError) as error:
        place(slots, size)
    assert f"{size} ranks" in str(error.value)
    assert f"{sum(slots)} slot" in str(error.value)
    counts = [0] * len(slots)
    for slot in place(slots, size, oversubscribe=True):
        counts[slot.host] += 1
    extra = [count - available for count, available in zip(counts, slots, strict=True)]
    assert sum(counts) == size
    assert max(extra) - min(extra) <= 1


def test_a_host_takes_no_more_than_its_most() -> None:
    placed = place([2, 2, 2], 9, oversubscribe=True, most=[2, None, 3])
    assert [slot.host for slot in placed] == [0, 0, 1, 1, 1, 1, 2, 2, 2]
    with pytest.raises(PlacementError, match="-np 5 asks for 5 ranks but max_slots allows 4: name more hosts"):
        place([1, 1], 5, oversubscribe=True, most=[2, 2])


@pytest.mark.parametrize(("slots", "size"), [([1], 0), ([1], -3), ([], 1), ([0], 1)])
def test_nothing_to_place_is_an_error(slots: list[int], size: int) -> None:
    with pytest.raises(PlacementError):
        place(slots, size)


FOLDER = Path(__file__).parent / "allocations"


def recorded(name: str) -> dict[str, str]:
    lines = (FOLDER / f"{name}.env").read_text().splitlines()
    return dict(line.replace("@FOLDER", str(FOLDER)).split("=", 1) for line in lines)


def read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


EXPECTED = {
    "slurm-tasks": ("Slurm", "node1:2 node2:2 node3:2 node07:1"),
    "slurm-gpus": ("Slurm", "gpu3:4 gpu4:4"),
    "slurm-gres": ("Slurm", "gpu1:4 gpu2:4"),
    "slurm-gpus-of-job": ("Slurm", "gpu1:4 gpu2:2"),
    "slurm-salloc-shell": ("Slurm", "node1:2 node2:2"),
    "slurm-pty": ("Slurm", "node5:4"),
    "slurm-old": ("Slurm", "login:1 rack0n01:4 rack0n02:4 rack1n01:4 rack1n02:4"),
    "pbs-pro": ("PBS", "n01.cluster.org:2 n02.cluster.org:2 n03.cluster.org:1"),
    "torque": ("PBS", "c7:2 c4:2"),
    "lsf": ("LSF", "hostA:5 hostB:2"),
    "lsf-hostfile": ("LSF", "hostB:1 hostA:2"),
    "lsf-hosts": ("LSF", "hostC:2 hostD:1"),
    "lsf-csm": ("LSF", "a01n04:42 a01n05:42"),
    "sge": ("SGE", "exec1.site:5 exec2.site:2"),
}


def test_every_recorded_job_has_its_expectation() -> None:
    assert {path.stem for path in FOLDER.glob("*.env")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_hosts_and_slots_of_a_job_are_read(name: str) -> None:
    system, hosts = EXPECTED[name]
    found = find_allocation(recorded(name), read)
    assert found is not None
    assert found.system == system
    assert " ".join(f"{host.name}:{host.slots}" for host in found.hosts) == hosts
    assert re.search(r" (job) \S+ \(.*[A-Z_]+=", found.source)


@pytest.mark.parametrize(
    "environ",
    [{}, {"SLURM_JOB_ID": "1"}, {"SLURM_JOB_NODELIST": "h1"}, {"LSB_JOBID": "1"}, {"PBS_JOBID": "1"}, {"JOB_ID": "1"}],
)
def test_half_of_it_is_no_allocation(environ: dict[str, str]) -> None:
    assert find_allocation(environ, read) is None


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"SLURM_JOB_NODELIST": "node[1-"}, r"SLURM_JOB_NODELIST='node\[1-': .*node\[1-"),
        ({"SLURM_JOB_NODELIST": "-oProxy=x", "SLURM_TASKS_PER_NODE": "1"}, "NODELIST='-oProxy=x'.* no name of a host"),
        ({"SLURM_TASKS_PER_NODE": "2(y3)"}, r"SLURM_TASKS_PER_NODE='2\(y3\)'"),
        ({"SLURM_TASKS_PER_NODE": "2(x3)"}, r"SLURM_TASKS_PER_NODE='2\(x3\)': speaks of 3 hosts, and the job has 4"),
        ({"SLURM_TASKS_PER_NODE": "2(x3),0"}, "a host with 0"),
        ({"SLURM_TASKS_PER_NODE": "", "SLURM_JOB_CPUS_PER_NODE": "4"}, "CPUS_PER_NODE='4': speaks of 1 hosts"),
        (
            dict.fromkeys(["SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_CPUS_ON_NODE"], ""),
            "neither SLURM_",
        ),
        ({"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID='x': is no number"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4: srun has started 4 copies"),
        ({"SLURM_NTASKS": "", "SLURM_NPROCS": "", "SLURM_GPUS_PER_NODE": "many"}, "SLURM_GPUS_PER_NODE='many'"),
    ],
)
def test_damaged_words_of_slurm_are_named(changed: dict[str, str], fault: str) -> None:
    with pytest.raises(AllocationError, match=fault):
        find_allocation({**recorded("slurm-tasks"), **changed}, read)


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a 2 b"}, "LSB_MCPU_HOSTS='a 2 b': is no list of hosts"),
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a two"}, "LSB_MCPU_HOSTS='a two'"),
        ({"LSB_JOBID": "1", "LSB_DJOB_HOSTFILE": "/no/such"}, "LSB_DJOB_HOSTFILE='/no/such': cannot be read: No such"),
        ({"PBS_NODEFILE": "/no/such"}, "PBS_NODEFILE='/no/such': cannot be read: No such file"),
        ({"PE_HOSTFILE": "/no/such"}, "PE_HOSTFILE='/no/such': cannot be read: No such file"),
    ],
)
def test_damaged_words_of_other_systems_are_named(environ: dict[str, str], fault: str) -> None:
    with pytest.raises(AllocationError, match=fault):
        find_allocation(environ, read)


@pytest.mark.parametrize(
    ("variable", "content", "fault"),
    [
        ("PBS_NODEFILE", b"", "names no host"),
        ("PBS_NODEFILE", b"a b\n", "'a b' is no name of a host"),
        ("PBS_NODEFILE", b"\xff\xfe", "is not text"),
        ("PE_HOSTFILE", b"a\n", "its line 'a' is no host with its slots"),
        ("PE_HOSTFILE", b"a 0 q x\n", "its line 'a 0 q x'"),
    ],
)
def test_a_bad_host_file_is_named_with_its_variable(tmp_path: Path, variable: str, content: bytes, fault: str) -> None:
    (tmp_path / "hosts").write_bytes(content)
    with pytest.raises(AllocationError, match=f"{variable}='{tmp_path}/hosts'.*{fault}"):
        find_allocation({variable: f"{tmp_path}/hosts"}, read)


@pytest.mark.parametrize(("asked", "tasks"), [("3", 3), ("4", None), ("", None)])
def test_a_job_may_ask_for_fewer_tasks_than_it_has_slots(asked: str, tasks: int | None) -> None:
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "h[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
    found = find_allocation({**job, "SLURM_NTASKS": asked}, str)
    assert found is not None
    assert ([host.slots for host in found.hosts], found.tasks) == ([2, 2], tasks)


def test_a_batch_host_is_left_out_only_where_csm_allocates() -> None:
    environ = {**recorded("lsf-csm"), "CSM_ALLOCATION_ID": ""}
    found = find_allocation(environ, read)
    assert found is not None
    assert found.hosts[0] == HostSpec("batch2", slots=1)


HOSTS = (HostSpec("a", slots=2), HostSpec("b", slots=2))
SLURM = Allocation("Slurm", HOSTS, "Slurm job 1")
LSF = Allocation("LSF", HOSTS, "LSF job 1")
PBS = Allocation("PBS", HOSTS, "PBS job 1")
LOCAL = (HostSpec("localhost"),)


ME, PORT = (HostSpec("a", user="me"),), (HostSpec("a", port=22),)
CHOSEN = [
    ("auto", LOCAL, None, True, "ssh"), ("auto", HOSTS, SLURM, True, "slurm"), ("auto", HOSTS, SLURM, False, "ssh"),
    ("auto", HOSTS[1:], SLURM, True, "slurm"), ("auto", LOCAL, SLURM, True, "slurm"),
    ("auto", (HostSpec("c"),), SLURM, True, "ssh"), ("auto", ME, SLURM, True, "ssh"),
    ("auto", PORT, SLURM, True, "ssh"), ("auto", HOSTS, LSF, True, "jsrun"), ("auto", HOSTS, LSF, False, "ssh"),
    ("auto", HOSTS[1:], LSF, True, "ssh"), ("auto", HOSTS, PBS, True, "ssh"), ("ssh", HOSTS, SLURM, True, "ssh"),
    ("mpi", HOSTS, SLURM, True, "mpi"), ("slurm", HOSTS, None, True, "this is no Slurm job"),
    ("slurm", ME, SLURM, True, "host a is named with a user or a port"),
    ("jsrun", HOSTS, SLURM, True, "this is no LSF job"), ("jsrun", HOSTS[1:], LSF, True, "leave out -H"),
    ("jsrun", HOSTS, LSF, False, "there is no jsrun in PATH"),
]  # fmt: skip
"""What is asked for, the hosts, the batch job, whether its program is there, and what is chosen or said."""


# The cases have numbers, since pytest-mpi skips what is called just "mpi".
@pytest.mark.parametrize(("asked", "hosts", "allocation", "there", "result"), CHOSEN, ids=range(len(CHOSEN)))
def test_a_launcher_is_chosen_or_refused(
    asked: str, hosts: tuple[HostSpec, ...], allocation: Allocation | None, there: bool, result: str
) -> None:
    which = (lambda name: f"/bin/{name}") if there else (lambda _: None)
    if " " in result:
        with pytest.raises(JobError, match=result):
            choose_launcher(asked, hosts, allocation, which)
    else:
        assert choose_launcher(asked, hosts, allocation, which) == result


def test_a_damaged_allocation_matters_only_where_it_is_needed() -> None:
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a[", "SLURM_TASKS_PER_NODE": "1"}
    assert allocated(environ, named=True) is None
    with pytest.raises(JobError, match="SLURM_JOB_NODELIST='a\\['"):
        allocated(environ, named=False)


def test_options_for_mpirun_become_part_of_the_job() -> None:
    job = parsed("-np 1 --mpi --mpirun /m --mpi-args=-v --binding-args=--bind-to=core --tcp --dry-run cmd")
    assert (job.mpi.program, job.mpi.arguments, job.mpi.binding) == ("/m", ("-v",), ("--bind-to=core",))
    assert (job.mpi.tcp, job.dry_run) == (True, True)


def test_a_batch_job_gives_hosts_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSB_JOBID", "5")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "a 2 b 1")
    job = parsed("--launcher ssh cmd")
    assert (job.size, job.hosts) == (3, (HostSpec("a", slots=2), HostSpec("b", slots=1)))
    assert job.hosts_from == "LSF job 5 (LSB_MCPU_HOSTS=a 2 b 1)"
    job = parsed("--launcher ssh -np 2 -H c:2 cmd")
    assert (job.size, job.hosts, job.hosts_from) == (2, (HostSpec("c", slots=2),), "")
