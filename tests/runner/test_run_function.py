"""horo.run: a function is called in every rank; results, exceptions and interrupts come back."""

import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from jobs import DEADLINE_S, TORCH_S, Hororun, make_remote_shell, run_python, wait_until

import horo
from horo.bootstrap.store.protocol import StoreTimeoutError
from horo.errors import GroupError, HoroError, UnsupportedError, UsageError
from horo.runner.call.notebook import viewer
from horo.runner.call.parent import check_outcomes
from horo.runner.call.pickling import Pickler, dumps
from horo.runner.call.values import Outcome, get, put

OVERSUBSCRIBE = ["--oversubscribe"]


def own_rank() -> int:
    return int(os.environ["HOROVOD_RANK"])


def test_results_come_in_rank_order() -> None:
    def power(base: int, *, exponent: int) -> tuple[int, int]:
        return own_rank(), base**exponent

    assert horo.run(power, (2,), {"exponent": 5}, np=3, options=OVERSUBSCRIBE) == [(0, 32), (1, 32), (2, 32)]


def test_ranks_behind_an_agent_and_large_values(tmp_path: Path) -> None:
    shell = make_remote_shell(tmp_path)
    data = bytes(range(256)) * 40_000  # 10 MB, more than a value of the store

    results = horo.run(
        lambda sent: (sent[::-1], os.environ["HOROVOD_HOSTNAME"]),
        (data,),
        num_proc=2,
        hosts="one:1,two:1",
        options=["--remote-shell", shell],
    )
    assert results == [(data[::-1], "one"), (data[::-1], "two")]


class OddError(Exception):
    """Cannot be made from its own arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def test_an_exception_is_raised_here_with_the_ranks_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        if own_rank() == 1:
            raise ZeroDivisionError("bad sample")

    with pytest.raises(ZeroDivisionError, match="bad sample") as caught:
        horo.run(fail, np=2, options=OVERSUBSCRIBE)
    assert isinstance(caught.value.__cause__, HoroError)
    lines = str(caught.value.__cause__).splitlines()
    assert lines[0].startswith("in rank 1 (")
    assert lines[-1] == "ZeroDivisionError: bad sample"
    assert 'raise ZeroDivisionError("bad sample")' in "\n".join(lines)


def test_an_exception_that_cannot_be_pickled_is_told_in_words() -> None:
    def fail() -> None:
        raise OddError(1, 2)

    with pytest.raises(HoroError, match=r"^rank 0 ended with .*OddError: 1 and 2$"):
        horo.run(fail, np=1)


ENDS = [
    ("sys.exit(0)", "rank 0 ended with SystemExit: 0"),
    ("os._exit(5)", "horo.run: hororun ended with exit code 5\nhororun: rank 0"),
    ("os.kill(os.getpid(), 9)", "horo.run: hororun ended with exit code 137\nhororun: rank 0"),
    ("os._exit(0)", "horo.run: rank 0 ended without a result and with exit code 0, as os._exit(0) does"),
    ("raise type('OddError', (BaseException,), {})('x')", "rank 0 ended with OddError: x"),
    ("raise KeyboardInterrupt", "rank 0 ended with KeyboardInterrupt"),
]


@pytest.mark.parametrize(("code", "text"), ENDS, ids=[code for code, _ in ENDS])
def test_a_rank_that_ends_without_a_result(code: str, text: str) -> None:
    with pytest.raises(HoroError) as caught:
        horo.run(exec, (f"import os, sys\n{code}", {}), np=1)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("clean", ["SystemExit", "SystemExit: 0"])
def test_a_rank_that_fails_comes_before_one_that_has_exited_without_an_error(clean: str) -> None:
    outcomes = [Outcome(False, None, "", clean, "h", 1), Outcome(False, None, "", "SystemExit: 7", "h", 2)]
    with pytest.raises(HoroError, match=r"rank 1 ended with SystemExit: 7"):
        check_outcomes(outcomes, 7, "")


def test_the_error_of_the_script_comes_before_that_of_its_victims() -> None:
    def failure(error: Exception, order: int) -> Outcome:
        return Outcome(False, pickle.dumps(error), f"{type(error).__name__}: {error}\n", str(error), "h1", order)

    with pytest.raises(ValueError, match="the cause"):
        check_outcomes([failure(GroupError("rank 1 is gone"), 1), failure(ValueError("the cause"), 2), None], 1, "")
    with pytest.raises(ValueError, match="the cause"):
        check_outcomes([failure(RuntimeError("training failed"), 2), failure(ValueError("the cause"), 1), None], 1, "")
    with pytest.raises(GroupError):
        check_outcomes([failure(GroupError("rank 1 is gone"), 1), None], 1, "")
    with pytest.raises(UsageError, match="more ranks than slots"):
        check_outcomes([None], 2, "hororun: more ranks than slots")


WRONG_ARGUMENTS = [
    ({"np": 0}, UsageError, "horo.run: -np 0: at least one rank is needed"),
    ({"hosts": "a:b:c"}, UsageError, "horo.run: "),
    ({"hosts": "a:1", "hostfile": "x"}, UsageError, "horo.run: "),
    ({"options": ["--nothing"]}, UsageError, "horo.run: there is no option '--nothing'"),
    ({"options": ["--dry-run"]}, UsageError, "horo.run: options= has one with which hororun starts no ranks"),
    ({"use_gloo": True, "use_mpi": True}, UsageError, "use_gloo and use_mpi are both true"),
    ({"min_np": 2}, UsageError, "horo.run: -np 1 must lie between --min-np 2 and --max-np 1"),
    ({"max_np": 2}, UsageError, "horo.run: --max-num-proc is for an elastic job"),
    ({"args": (threading.Lock(),)}, UnsupportedError, "horo.run: own_rank or an argument of it cannot be pickled: "),
    ({"func": "f"}, UsageError, "horo.run: 'f' is not a function"),
    ({"args": 5}, UsageError, "horo.run: args=5 is no tuple"),
    ({"kwargs": [1]}, UsageError, "horo.run: kwargs=[1] is no mapping"),
    ({"env": {"A": 1}}, UsageError, "horo.run: env: 'A'=1 is no variable"),
    ({"np": True}, UsageError, "horo.run: True is no number of ranks"),
    ({"num_proc": 3, "np": 2}, UsageError, "horo.run: num_proc=3 and np=2 are two names of one argument"),
    ({"options": "--oversubscribe"}, UsageError, "horo.run: options='--oversubscribe' is one text"),
    ({"options": ["sleep"]}, UsageError, "horo.run: options=['sleep'] has a word that is no option of hororun"),
    ({"hosts": ""}, UsageError, "horo.run: "),
]


@pytest.mark.parametrize(
    ("arguments", "kind", "text"), WRONG_ARGUMENTS, ids=[str(next(iter(each[0]))) for each in WRONG_ARGUMENTS]
)
def test_a_wrong_argument_is_named(arguments: dict[str, object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        horo.run(**{"func": own_rank, **arguments})  # type: ignore[arg-type]
    assert str(caught.value).startswith(text)


def test_a_process_that_the_function_forks_has_no_outcome() -> None:
    def fork() -> str:
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        os.waitpid(pid, 0)
        return "the parent's"

    assert horo.run(fork, np=1) == ["the parent's"]


def test_threads_of_the_caller_may_run_at_once() -> None:
    before = sys.stderr
    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.append(horo.run(own_rank, np=1))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (results, sys.stderr) == ([[0]] * 3, before)


SCRIPT = """
import sys, time
import helper
import horo

def work(folder):
    import os, pathlib
    print("begins", os.environ["HOROVOD_RANK"], helper.WORD)
    pathlib.Path(folder, "began" + os.environ["HOROVOD_RANK"]).touch()
    if helper.WAITS:
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    return helper.WORD

if __name__ == "__main__":
    print(horo.run(work, (sys.argv[1],), np=2, options=["--oversubscribe", "--grace-seconds", "1"]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script of its own folder, which imports its neighbour, there and in the ranks."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "helper.py").write_text("WORD = 'neighbour'\nWAITS = False\n")
    (tmp_path / "scripts" / "script.py").write_text(SCRIPT)
    return tmp_path / "scripts" / "script.py"


def test_a_function_of_main_finds_the_modules_beside_its_script(script: Path, tmp_path: Path) -> None:
    done = run_python(str(script), str(tmp_path), cwd=tmp_path, check=True)
    *said, results = done.stdout.splitlines()
    assert sorted(said) == ["[0] begins 0 neighbour", "[1] begins 1 neighbour"]
    assert results == "['neighbour', 'neighbour']"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_caller(hororun: Hororun, script: Path, tmp_path: Path, number: signal.Signals) -> None:
    (script.parent / "helper.py").write_text("WORD = ''\nWAITS = True\n")
    launched = hororun.launch([sys.executable, str(script), str(tmp_path)], cwd=tmp_path)
    wait_until(lambda: all((tmp_path / f"began{rank}").exists() for rank in (0, 1)), "both ranks", deadline_s=TORCH_S)
    os.kill(launched.process.pid, number)
    assert launched.process.wait(DEADLINE_S) == -number
    launched.nothing_is_left()


def test_a_result_that_cannot_travel_is_told() -> None:
    with pytest.raises(UnsupportedError, match=r"what .*lock.* has returned in rank 0, a lock, cannot be pickled"):
        horo.run(threading.Lock, np=1)


def test_variables_reach_other_hosts(tmp_path: Path) -> None:
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\nfor command; do :; done\nexec env -i PATH="$PATH" sh -c "$command"\n')
    shell.chmod(0o755)
    options = ["--remote-shell", str(shell)]
    assert horo.run(lambda: os.environ["GIVEN"], np=1, hosts="far:1", env={"GIVEN": "x"}, options=options) == ["x"]


PIECE = 4 << 20


class Store:
    """A store in this process that notes what it is asked."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.order: list[str] = []

    def set(self, key: str, value: bytes) -> None:
        assert 0 < len(value) <= PIECE
        self.values[key] = value
        self.order.append(key)

    def get(self, key: str, timeout_s: float) -> bytes:
        if key not in self.values:
            raise StoreTimeoutError([key])
        return self.values[key]

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self.values.pop(key, None)


@pytest.mark.parametrize("size", [0, 1, 5000, PIECE - 20, PIECE, 3 * PIECE + 7])
def test_an_object_of_any_size_comes_back(size: int) -> None:
    store = Store()
    value = {"data": bytes(range(256)) * (size // 256) + b"x" * (size % 256), "more": [1, "two", None]}
    put(store, "key", value)
    assert store.order[-1] == "key"  # a reader sees all or nothing
    assert get(store, "key", 0.0) == value == get(store, "key", 0.0, once=True)
    assert list(store.values) == ["key"]


def test_an_object_that_cannot_be_pickled_leaves_nothing() -> None:
    store = Store()
    with pytest.raises(TypeError, match="lock"):
        put(store, "key", [bytes(2 * PIECE), threading.Lock()], Pickler)
    assert store.order != []
    assert store.values == {}


@pytest.mark.parametrize("without_name", [False, True], ids=["this cloudpickle", "3.1.3"])
def test_code_keeps_the_name_of_its_file(monkeypatch: pytest.MonkeyPatch, without_name: bool) -> None:
    table = cloudpickle.Pickler.dispatch_table.maps[0]
    reduce_code = table[CodeType]

    def reduce_without_name(code: CodeType) -> Any:
        make, values = reduce_code(code)
        return make, tuple("<dynamic-code>" if value == code.co_filename else value for value in values)

    if without_name:
        monkeypatch.setitem(table, CodeType, reduce_without_name)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def train():\n    return lambda: 0\n", "/k/train.py", "exec"), space)
    train = pickle.loads(dumps(space["train"]))
    assert train is not space["train"]
    assert train.__code__.co_filename == train().__code__.co_filename == "/k/train.py"


CELLS = [
    "import horo\nfactor = 3\n\nclass Point:\n    def __init__(self, x):\n        self.x = x",
    """
def scaled(amount):
    from horo.bootstrap.job import start
    job = start()
    print("rank", job.rank, "of", job.size)
    return Point(job.rank * factor + amount)

points = horo.run(scaled, (10,), np=2, options=["--oversubscribe"])
[point.x for point in points]
""",
    """
def fail():
    raise ValueError(f"no batch of {factor}")

try:
    horo.run(fail, np=1)
except ValueError as error:
    print("caught:", error)
    print(str(error.__cause__).splitlines()[0][:10])
""",
    """
def count():
    import os, time
    from horo.diagnostics.page import Page
    page = Page(os.environ["HORO_COUNTS_FD"])
    page.begin(size=1, cores=1, ranks_here=1, via="shared memory")
    for step in range(1, 8):
        page.step_begins(step)
        page.step_ends(step, step - 1, 100_000_000 * (step - 1), 0, 0, 0, 0, 0, 0)
    while not os.path.exists("seen"):
        time.sleep(0.01)

horo.run(count, np=1)
""",
]


def outputs(notebook: Any, index: int) -> str:
    """What stands under a cell."""
    cell = notebook.cells[index]
    assert all(each.output_type != "error" for each in cell.outputs), cell.outputs
    return "".join(each.get("text") or each.data["text/plain"] for each in cell.outputs)


@pytest.mark.parametrize("kernel", [None, object()])
@pytest.mark.parametrize("live", ["0", "1"])
def test_no_line_is_shown_where_there_is_no_notebook_or_it_is_turned_off(
    monkeypatch: pytest.MonkeyPatch, kernel: object, live: str
) -> None:
    shell = SimpleNamespace(kernel=kernel)
    fake = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=print))
    with subprocess.Popen(["true"]) as process:
        monkeypatch.delitem(sys.modules, "IPython", raising=False)
        assert not [*viewer(process, {"HORO_LIVE": live})]
        monkeypatch.setitem(sys.modules, "IPython", fake)  # type: ignore[arg-type]
        assert len([*viewer(process, {"HORO_LIVE": live})]) == (kernel is not None and live == "1")


def test_a_notebook_calls_functions_of_its_cells_in_ranks(tmp_path: Path) -> None:
    why = "no Jupyter here: `pip install nbclient ipykernel`"
    nbclient, nbformat, _ = (pytest.importorskip(each, reason=why) for each in ("nbclient", "nbformat", "ipykernel"))
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in CELLS])
    environment = {"JUPYTER_PLATFORM_DIRS": "1", "IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}

    class Client(nbclient.NotebookClient):  # type: ignore[misc, name-defined]
        def process_message(self, message: dict[str, Any], *where: Any) -> Any:
            if message["msg_type"] == "display_data":
                (tmp_path / "seen").touch()
            return super().process_message(message, *where)

    client = Client(made, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    done = client.execute(env={**os.environ, **environment})
    *printed, value = outputs(done, 1).splitlines()
    assert (sorted(printed), value) == (["[0] rank 0 of 2", "[1] rank 1 of 2"], "[10, 13]")
    said = outputs(done, 2)
    assert "caught: no batch of 3\nin rank 0 " in said
    assert outputs(done, 3).startswith("over; last: step 7 | 10 steps/s | ")
