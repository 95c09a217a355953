"""What others plant or change is neither written to, nor run, nor unpickled; and no ``repr`` has a secret."""

import ctypes
import dataclasses
import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from fabric import make_setups
from jobs import Hororun, run_python, wait_until
from rank_pool import RankPool, on

import horo.bootstrap
import horo.runner
import horo.torch as hvd
from horo.bootstrap.auth.handshake import Acceptor, Claim, HandshakeResult, Purpose
from horo.bootstrap.launchers.slurm_store import _StoreInfo
from horo.bootstrap.net.addresses import Endpoint
from horo.bootstrap.net.dial import _Attempt
from horo.bootstrap.tuned_values import check_log
from horo.config.table import read_config
from horo.core.context import Context
from horo.errors import MismatchError, UsageError
from horo.runner.agent.protocol import Kind, Message
from horo.runner.job.external_launcher import _Plan
from horo.runner.job.rank_files import RankFiles
from horo.timeline import TimelineError, merge
from horo.torch.engine import runtime
from horo.torch.functions import object_mac

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


def prepare(tmp_path: Path) -> tuple[Path, Path]:
    """The folder of rank 0, and a file of the victim with 5 bytes elsewhere."""
    folder = tmp_path / "logs" / "rank.0"
    folder.mkdir(parents=True, mode=0o755)
    folder.chmod(0o755)
    secret = tmp_path / "secret"
    secret.write_bytes(b"12345")
    secret.chmod(0o600)
    return folder, secret


def open_files(tmp_path: Path) -> RankFiles:
    return RankFiles(str(tmp_path / "logs"), ["h"], named=False)


PLANTED: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "symbolic link": (lambda path, secret: path.symlink_to(secret), "it is a symbolic link"),
    "second name": (lambda path, secret: path.hardlink_to(secret), "it has 2 names"),
    "fifo": (lambda path, _: os.mkfifo(path), "it is no regular file"),
}


def test_a_folder_that_others_can_write_to_or_have_linked_is_refused(tmp_path: Path) -> None:
    folder, _ = prepare(tmp_path)
    for mode in (0o775, 0o1777):
        folder.chmod(mode)
        with pytest.raises(OSError, match="others can write to it; 'chmod go-w' it"):
            open_files(tmp_path)
    folder.chmod(0o755)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="it is a symbolic link"):
        open_files(tmp_path)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@needs_root
def test_a_folder_that_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    folder, _ = prepare(tmp_path)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(OSError, match=f"it belongs to user {NOBODY}, not to you"):
        open_files(tmp_path)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_files_of_an_earlier_job_are_replaced_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for text in (b"longer", b"new"):
            os.write(open_files(tmp_path).fd(0, 1), text)
    finally:
        os.umask(before)
    assert (tmp_path / "logs" / "rank.0" / "stdout").read_bytes() == b"new"


def merge_timelines(out: Path) -> None:
    rank = out.with_name("t-0.json")
    rank.write_text(
        '[{"args": {"rank": 0, "size": 1, "host": "h", "clock": "c", "monotonic_ns": 1000,'
        ' "start_time_since_epoch_in_micros": 5}}]'
    )
    merge(str(out), [str(rank)])


def start_timeline(out: Path) -> None:
    setup = make_setups([1])[0]
    context = Context(setup)
    try:
        context.start_timeline(str(out))
    finally:
        context.destroy()


def start_log(out: Path) -> None:
    check_log(read_config({"HORO_AUTOTUNE": "1", "HORO_AUTOTUNE_LOG": str(out)}), 0)


WRITERS = [merge_timelines, start_timeline, start_log]


@pytest.mark.parametrize("write", WRITERS)
def test_no_file_that_horo_writes_is_one_that_others_planted(tmp_path: Path, write: Callable[[Path], None]) -> None:
    _, secret = prepare(tmp_path)
    reader = None
    try:
        for number, (plant, reason) in enumerate([*PLANTED.values(), PLANTED["fifo"]]):
            out = tmp_path / f"planted{number}"
            plant(out, secret)
            reader = os.open(out, os.O_RDONLY | os.O_NONBLOCK) if number == len(PLANTED) else None
            with pytest.raises((UsageError, TimelineError), match=f"{out}.*cannot be written.*{reason}"):
                write(out)
            if number == 1:
                out.unlink()
    finally:
        if reader is not None:
            os.close(reader)
    assert secret.read_bytes() == b"12345"
    own = tmp_path / "own"  # an earlier file, which is replaced
    own.write_bytes(b"[" * 1_000_000)
    write(own)
    assert len(own.read_bytes()) < 10_000


@needs_root
@pytest.mark.parametrize("write", WRITERS)
def test_no_file_that_horo_writes_belongs_to_another_user(tmp_path: Path, write: Callable[[Path], None]) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"12345")
    os.chown(out, NOBODY, NOBODY)
    with pytest.raises((UsageError, TimelineError), match=f"it belongs to user {NOBODY}, not to you"):
        write(out)
    assert out.read_bytes() == b"12345"


@needs_root
@pytest.mark.parametrize("write", WRITERS[:2])
def test_new_files_are_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]) -> None:
    """File systems that give all files to one user, as NFS does with those of root, name that one as its owner."""
    tmp_path.chmod(0o777)
    monkeypatch.chdir(tmp_path)

    def write_as_on_nfs() -> None:
        ctypes.CDLL(None).setfsuid(NOBODY)  # of this thread only
        write(Path("out"))

    with ThreadPoolExecutor(1) as thread:
        thread.submit(write_as_on_nfs).result()
    assert Path("out").stat().st_uid == NOBODY
    assert Path("out").read_bytes().startswith(b"[")


def test_hororun_says_which_file_it_is_and_what_to_do(tmp_path: Path) -> None:
    folder, secret = prepare(tmp_path)
    (folder / "stdout").symlink_to(secret)
    words = ["-np", "1", "-H", "localhost:1", "--output-filename", str(tmp_path / "logs"), "true"]
    done = run_python("-m", "horo.runner", *words)
    assert done.returncode == 2
    assert done.stderr == (
        f"hororun: --output-filename {tmp_path}/logs: cannot make {folder}/stdout: "
        "it is a symbolic link; remove it or name another folder\n"
    )
    assert secret.read_bytes() == b"12345"


NAMES = ("json", "secrets", "argparse", "selectors", "shlex", "subprocess", "hmac", "struct", "random", "socket", "pwd")


def plant(folder: Path, names: Sequence[str] = NAMES) -> Path:
    """Modules that write a file when they are imported; returns that file."""
    ran = folder / "ran"
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r} + ' ')\nraise SystemExit(77)\n")
    return ran


ALL = sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))


@pytest.mark.parametrize(
    ("module", "option"),
    [("horo", "-m"), ("horo.runner", "-m"), ("horo.timeline", "-m"), ("horo.horovod", "-Im"), ("horo.runner", "-um")],
)
def test_no_command_imports_any_module_of_that_name(tmp_path: Path, module: str, option: str) -> None:
    ran = plant(tmp_path, (*ALL, "__future__"))
    words = [f"{option}{module}"] if option == "-um" else [option, module]
    done = run_python(*words, "-h", cwd=tmp_path)
    assert (done.returncode, ran.exists()) == (0, False), done.stderr


def test_agents_do_not_import_from_it_either(hororun: Hororun, tmp_path: Path) -> None:
    ran = plant(tmp_path)
    done = hororun.run("-np", "2", "true", where="one:1,two:1", cwd=tmp_path)
    assert (done.returncode, ran.exists()) == (0, False), done.stderr


def test_a_script_still_imports_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "train.py").write_text("import beside\nimport os\nos.write(1, b'imported\\n')\n")
    hororun = ["-m", "horo.runner", "-np", "1", "-H", "localhost:1", "--no-prefix"]
    for words in (["train.py"], ["-m", "train"]):
        done = run_python(*hororun, *words, cwd=tmp_path)
        assert done.stdout == "imported\n", done.stderr


SECRET = b"do not show this"
CLAIM = Claim(Purpose.STORE)
SAID = re.compile("|".join(re.escape(text) for text in (SECRET.decode(), SECRET.hex(), repr(SECRET)[2:-1])))


@pytest.mark.parametrize(
    "holder",
    [
        HandshakeResult(CLAIM, SECRET, SECRET),
        Acceptor(SECRET),
        _Attempt(SECRET, CLAIM, 0.0, {}),
        _StoreInfo("job/1", [Endpoint("10.0.0.1", 4711)], SECRET),
        _Plan("mpirun", ["mpirun"], {"HORO_SECRET": SECRET.hex()}),
        Message(Kind.JOB, 0, json.dumps({"environment": {"HORO_SECRET": SECRET.hex()}}).encode()),
    ],
    ids=lambda holder: type(holder).__name__,
)
def test_a_repr_does_not_show_the_secret(holder: object) -> None:
    for shown in (repr(holder), str(holder), f"{[holder]}"):
        assert type(holder).__name__ in shown
        assert not SAID.search(shown)


def fields_in_a_repr() -> Iterator[str]:
    for package in (horo.bootstrap, horo.runner):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for module_name, module_object in list(sys.modules.items()):
        if not module_name.startswith("horo."):
            continue
        for each in vars(module_object).values():
            if inspect.isclass(each) and dataclasses.is_dataclass(each):
                yield from (f"{each.__name__}.{field.name}" for field in dataclasses.fields(each) if field.repr)
            elif inspect.isclass(each) and issubclass(each, tuple) and "__repr__" not in vars(each):
                yield from (f"{each.__name__}.{name}" for name in getattr(each, "_fields", ()))


def test_no_field_that_is_named_for_a_secret_is_in_a_repr() -> None:
    shown = set(fields_in_a_repr())
    assert "HandshakeResult.claim" in shown
    secret = re.compile(r".*\.(\w*secret|\w+_key|key|environment|token)")
    # of Variable: whether a variable is one; of Option: its key in a configuration file
    assert {name for name in shown if secret.fullmatch(name)} - {"Variable.secret", "Option.key"} == set()


@pytest.fixture(scope="module")
def ranks2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


OPERATIONS = ["broadcast", "allgather"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("attack", ["replaced", "without-mac", "replayed", "replayed-with-headers", "of-another-rank"])
def test_a_changed_object_is_not_unpickled(ranks2: RankPool, tmp_path: Path, operation: str, attack: str) -> None:
    """What rank 0 has pickled is replaced behind its seal, as by somebody on the link."""
    ran = str(tmp_path / "ran")

    def check() -> None:
        real, real_init = object_mac.ObjectKey.seal, object_mac.ObjectKey.__init__
        evil = b"\0" + cloudpickle.dumps(Evil(ran))
        seals: list[bytes] = []
        earlier: list[bytes] = []
        objects = [(rank, bytes(1000)) for rank in range(2)]  # longer than the evil one
        whole = objects[0] if operation == "broadcast" else objects

        def run() -> object:
            if operation == "broadcast":
                return hvd.broadcast_object(objects[hvd.rank()], root_rank=0, name="x")
            return hvd.allgather_object(objects[hvd.rank()], name="x")

        def seal(self: object_mac.ObjectKey, rank: int, data: bytes) -> bytes:
            seals.append(real(self, rank, data))
            if hvd.rank() != 0 or len(seals) == 1:  # the first call is left alone
                return seals[-1]
            return {
                "replaced": lambda: seals[-1][:32] + evil,
                "without-mac": lambda: evil,
                "replayed": lambda: seals[0],
                "replayed-with-headers": lambda: seals[0],
                "of-another-rank": lambda: real(self, 1 - rank, evil),
            }[attack]().ljust(32 + len(data), b"\0")

        def init(self: object_mac.ObjectKey, *arguments: Any, headers: bytes, **more: Any) -> None:
            earlier.append(headers)
            if attack == "replayed-with-headers" and hvd.rank() == 1:
                headers = earlier[0]
            real_init(self, *arguments, headers=headers, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(object_mac.ObjectKey, "seal", seal)
            patch.setattr(object_mac.ObjectKey, "__init__", init)
            assert run() == whole
            if operation == "broadcast" and hvd.rank() == 0:
                assert run() == whole
            else:
                with pytest.raises(MismatchError, match="the object of rank 0 was not sent by it for this call"):
                    run()
        assert run() == whole

    ranks2.run(check)
    assert not Path(ran).exists()


@on("ranks2")
def test_calls_without_a_name_and_with_the_name_none_are_not_the_same() -> None:
    """Two threads call in another order on each rank."""
    names: list[str | None] = [None, "None"] if hvd.rank() == 0 else ["None", None]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(hvd.allgather_object, (names[0], hvd.rank()), name=names[0])
        wait_until(lambda: runtime.current().requests, "it has begun")
        hvd.barrier()
        assert hvd.allgather_object((names[1], hvd.rank()), name=names[1]) == [(names[1], 0), (names[1], 1)]
        assert first.result(60) == [(names[0], 0), (names[0], 1)]
