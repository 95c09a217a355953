"""Every option in every kind of job: it has an effect there, or is refused by its name."""

import re

import pytest
from jobs import Hororun

from horo.runner.cli import main, parse
from horo.runner.cli.options import build_parser
from horo.runner.config import JobError

KINDS = {
    "one-host": (["-np", "2"], ["cmd"]),
    "two-hosts": (["-np", "2", "-H", "a:1,b:1"], ["cmd"]),
    "by-slurm": (["-np", "2", "--launcher", "slurm"], ["cmd"]),
    "by-mpirun": (["-np", "2", "--launcher", "mpi", "-H", "a:1,b:1"], ["cmd"]),
    "by-jsrun": (["-np", "2", "--launcher", "jsrun"], ["cmd"]),
    "check-hosts": (["--check-hosts", "-H", "a:1,b:1"], []),
    "check-build": (["--check-build"], []),
    "attach": (["--attach", "77"], []),
}
"""What stands before the option that is tried, and after it."""
SLURM = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a,b", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}
LSF = {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a 1 b 1"}

OWN = {"one-host", "two-hosts", "by-slurm"}
JOBS = {*OWN, "by-mpirun", "by-jsrun"}
BY_SSH = {"two-hosts", "by-mpirun", "check-hosts"}
REMOTE = {"two-hosts", "by-slurm", "check-hosts"}
NOT_BY_JSRUN = JOBS - {"by-jsrun"}
_IN_ALL_JOBS = """
--dry-run|--no-prefix|--output-filename out|--timeline-merge all.json --timeline-filename t-{{rank}}.json
--grace-seconds 3|--config-file {yaml}|--no-keep-memory|--no-move-ranks|--no-single-copy|--fusion-threshold-mb 1
--cycle-time-ms 1|--cache-capacity 1|--timeline-filename t.json|--timeline-mark-cycles --timeline-filename t.json
--no-timeline-mark-cycles|--autotune|--no-autotune|--autotune-log-file log.csv --autotune
--autotune-warmup-samples 1 --autotune|--autotune-steps-per-sample 2 --autotune
--autotune-bayes-opt-max-samples 9 --autotune|--no-stall-check|--stall-check|--stall-check-warning-time-seconds 3
--stall-check-shutdown-time-seconds 3|--log-level info|--deadlock-time-seconds 3|--peer-timeout 3
--segment-bytes 8192|--spin-us 0|--overlap never|--gradients-ready step|--no-first-checks|--check-nan
--gpu-operations nccl|--transport tcp|--sockets-per-peer 2
"""
EFFECT = {
    **{each.split()[0][2:].replace("-", "_"): (each, JOBS) for each in re.split(r"[|\n]", _IN_ALL_JOBS.strip())},
    "num_proc": ("-np 2", JOBS),
    "hosts": ("-H a:1,b:1", JOBS | {"check-hosts"}),
    "hostfile": ("--hostfile {file}", JOBS | {"check-hosts"}),
    "oversubscribe": ("--oversubscribe", NOT_BY_JSRUN),
    "min_np": ("--min-np 1", OWN),
    "max_np": ("--max-np 3 --min-np 1", OWN),
    "reset_limit": ("--reset-limit 3 --min-np 1", OWN),
    "elastic_timeout": ("--elastic-timeout 3 --min-np 1", OWN),
    "elastic_dir": ("--elastic-dir d --min-np 1", OWN),
    "host_discovery_script": ("--host-discovery-script x", {"one-host", "by-slurm"}),
    "slots_per_host": ("--host-discovery-script x --slots-per-host 2", {"one-host", "by-slurm"}),
    "elastic_join": ("--elastic-join now --min-np 1", OWN),
    "on_failure": ("--on-failure host --min-np 1", OWN),
    "blacklist_cooldown_range": ("--blacklist-cooldown-range 5 60 --min-np 1", OWN),
    "output": ("--output rank0", OWN),
    "launcher": ("--gloo", {"one-host", "two-hosts", "check-hosts"}),
    "bind_to": ("--bind-to core", OWN),
    "bind_gpus": ("--bind-gpus", OWN),
    "horovod": ("--horovod", JOBS | {"check-build"}),
    "exports": ("-x A=1", JOBS),
    "network_interfaces": ("--network-interfaces lo", NOT_BY_JSRUN | {"check-hosts"}),
    "store_port": ("--store-port 5000", OWN),
    "port_range": ("--port-range 40000-40100", JOBS | {"check-hosts"}),
    "no_torch_env": ("--no-torch-env", OWN),
    "master_port": ("--master-port 5001", OWN),
    "prefix_timestamp": ("--prefix-timestamp", NOT_BY_JSRUN),
    "prefix_host": ("--prefix-host", OWN),
    "json_report": ("--json-report r.json", OWN),
    "summary": ("--summary", OWN),
    "no_summary": ("--no-summary", OWN),
    "live": ("--live", OWN),
    "metrics_port": ("--metrics-port 9400", OWN),
    "attach": ("--attach 77", {"attach"}),
    "stacks": ("--stacks", {"attach"}),
    "verbose": ("--verbose", JOBS | {"check-hosts"}),
    "failure_seconds": ("--failure-seconds 3", OWN),
    "start_timeout": ("--start-timeout 3", JOBS | {"check-hosts"}),
    "host_timeout": ("--host-timeout 3", REMOTE),
    "ssh_port": ("-p 2222", BY_SSH),
    "ssh_identity_file": ("-i key", BY_SSH),
    "ssh_args": ("--ssh-args=-v", BY_SSH),
    "remote_shell": ("--remote-shell rsh", BY_SSH),
    "remote_python": ("--remote-python /py", REMOTE),
    "mpirun": ("--mpirun m", {"by-mpirun"}),
    "mpi_args": ("--mpi-args=-v", {"by-mpirun", "by-jsrun"}),
    "binding_args": ("--binding-args=-v", {"by-mpirun", "by-jsrun"}),
    "tcp": ("--tcp", {"by-mpirun", "by-jsrun"}),
    "check_hosts": ("--check-hosts", {"check-hosts"}),
    "check_build": ("--check-build", {"check-build"}),
    "bench": ("--bench", set()),  # has no command beside it
}
"""An example of each option, and the kinds of jobs in which it has an effect."""
SHOWN_AT_ONCE = {"help", "version"}


def test_every_option_has_a_row() -> None:
    options = {action.dest for action in build_parser()._actions} - SHOWN_AT_ONCE - {"refused"}
    assert options == EFFECT.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", EFFECT)
def test_an_option_has_an_effect_or_is_refused_by_name(
    option: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path_factory.mktemp("job")
    (folder / "hosts").write_text("a slots=1\nb slots=1\n")
    (folder / "options.yaml").write_text("params: {cycle_time_ms: 2}\n")
    (folder / "jsrun").write_text("#!/bin/sh\n")
    (folder / "jsrun").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    for name, value in {"by-slurm": SLURM, "by-jsrun": LSF}.get(kind, {}).items():
        monkeypatch.setenv(name, value)
    example, kinds = EFFECT[option]
    before, after = KINDS[kind]
    words = example.format(file=folder / "hosts", yaml=folder / "options.yaml").split()
    if words[0] == "--hostfile" and "-H" in before:
        before = [word for word in before if word not in ("-H", "a:1,b:1")]
    if words[0] in before:  # it makes the job what it is
        return
    refusal = ""
    try:
        parse([*before, *words, *after])
    except JobError as error:
        refusal = str(error)
    except SystemExit:
        refusal = capfd.readouterr().err
    if kind in kinds:
        assert refusal == ""
    else:
        assert words[0].partition("=")[0] in refusal


@pytest.mark.parametrize(
    ("line", "similar"),
    [
        ("--verbos", "--verbose"),
        ("--host a", "--hosts"),
        ("--timestmap", "--prefix-timestamp"),
        ("--np 2", "-np"),
        ("--pn 2", "-np"),
        ("--p 22", "-p"),
        ("--timeline t.json", "--timeline-filename, --timeline-mark-cycles or --timeline-merge"),
        ("--bind core", "--bind-gpus, --bind-to or --binding-args"),
        ("--nproc-per-node=2", ""),
        ("--zz", ""),
        ("--output-file=x", "--output-filename"),
        ("--qqqqqq", ""),
    ],
)
def test_an_unknown_option_gets_a_similar_one(line: str, similar: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*line.split(), "cmd"])
    word = line.split(maxsplit=1)[0].partition("=")[0]
    hint = f": did you mean {similar}?" if similar else ""
    assert (end.value.code, capfd.readouterr().err) == (
        2,
        f"hororun: there is no option {word!r}{hint} (try 'hororun --help')\n",
    )


@pytest.mark.parametrize("where", ["localhost:1", "one:1"], ids=["direct", "agents"])
@pytest.mark.parametrize("words", [["true"], ["--dry-run", "true"]], ids=["run", "dry-run"])
def test_an_interface_that_is_not_here_is_refused_in_every_job(hororun: Hororun, where: str, words: list[str]) -> None:
    done = hororun.run("-np", "1", "--network-interfaces", "nosuch0,203.0.113.0/24", *words, where=where)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1)
    assert (
        "--network-interfaces nosuch0,203.0.113.0/24: none of them has an address here; this machine has" in done.stderr
    )
    assert "lo 127.0.0.1" in done.stderr


def test_ranks_that_shall_stay_do_so_whatever_the_environment_says(hororun: Hororun) -> None:
    show = ["--no-prefix", "--", "sh", "-c", "echo $HORO_LEAVE_CROWDED_CORES"]
    environment = {"HORO_LEAVE_CROWDED_CORES": "1"}
    assert hororun.run("-np", "1", "--no-move-ranks", *show, environment=environment).stdout == "0\n"
    assert hororun.run("-np", "1", *show, environment={"HORO_LEAVE_CROWDED_CORES": "0"}).stdout == "0\n"
    assert hororun.run("-np", "1", *show).stdout == "1\n"


def test_a_variable_that_hororun_only_suggests_may_be_set(hororun: Hororun) -> None:
    show = ["--no-prefix", "--", "sh", "-c", "echo ${PYTHONUNBUFFERED-none}"]
    assert hororun.run("-np", "1", *show).stdout == "1\n"
    assert hororun.run("-np", "1", "-x", "PYTHONUNBUFFERED=", *show).stdout == "\n"
