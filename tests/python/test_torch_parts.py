"""Parts of ``horo.torch`` without ranks; undocumented names of torch, which one module has, and each may be missing."""

import ast
import gc
import os
import pickle
import signal
import socket
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from jobs import run_python

import horo.torch as hvd
from horo.bootstrap.auth.handshake import HandshakeError
from horo.bootstrap.host import passed_file
from horo.bootstrap.host.passed_file import FileAddress, FileGiver, take_file
from horo.core.memory import create_memory
from horo.core.signal_safe_call import CallQueue, ThreadCall
from horo.errors import ResourceError, UnsupportedError
from horo.torch.compat import torch_private as private
from horo.torch.engine.tensor_bytes import bytes_of, tensor_of
from horo.torch.optimizer.sharding.hosts import arithmetic, is_compared, refuse_unlike
from horo.torch.optimizer.sharding.owners import LOAD_OF_TENSOR, share_out


def test_a_view_keeps_the_tensor_and_reads_its_memory() -> None:
    tensor = tensor_of(pickle.dumps({"a": 1}))
    alive = weakref.ref(tensor)
    part = bytes_of(tensor)[:]
    tensor[0] = 7
    assert part[0] == 7
    del tensor
    gc.collect()
    assert alive() is not None
    assert len(part) > 0
    del part
    gc.collect()
    assert alive() is None


LIMIT_S = 30.0
STARTS = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"


class _LeftError(RuntimeError):
    pass


@pytest.fixture
def signals() -> Iterator[None]:
    def handler(*_: object) -> None:
        raise _LeftError

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    signal.signal(signal.SIGUSR1, before)


class _Steps:
    """A step that goes on until it is told to end."""

    def __init__(self) -> None:
        self.begun, self.end, self.done = threading.Event(), threading.Event(), threading.Event()

    def step(self, _call: ThreadCall) -> None:
        self.begun.set()
        assert self.end.wait(LIMIT_S)
        self.done.set()


@pytest.mark.usefixtures("signals")
def test_an_exception_inside_the_start_of_the_thread_is_the_one_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Thread.start`` then fails by a KeyError of its own."""
    steps, start = _Steps(), getattr(threading, STARTS)

    def start_and_interrupt(*args: Any, **named: Any) -> Any:
        started = start(*args, **named)
        assert steps.begun.wait(LIMIT_S)
        signal.raise_signal(signal.SIGUSR1)
        return started

    queue = CallQueue()
    with monkeypatch.context() as patch:
        patch.setattr(threading, STARTS, start_and_interrupt)
        with pytest.raises(_LeftError):
            queue.do("step", steps.step)
    assert not steps.done.is_set()
    steps.end.set()
    assert queue.do("another", lambda _: 3) == 3  # comes after it
    assert steps.done.is_set()


@pytest.mark.usefixtures("signals")
def test_an_exception_beside_the_lock_of_a_start_is_the_one_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Thread.start`` then releases a lock twice, which is a RuntimeError like that of a thread that cannot start."""
    start, gate = getattr(threading, STARTS), threading.Event()
    release = threading.Condition._release_save  # type: ignore[attr-defined]

    def start_behind_gate(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return start(lambda *own: gate.wait(LIMIT_S) and function(*own), *args, **named)

    def release_and_interrupt(condition: threading.Condition) -> Any:
        released = release(condition)
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGUSR1)
        return released

    with monkeypatch.context() as patch:
        patch.setattr(threading, STARTS, start_behind_gate)
        patch.setattr(threading.Condition, "_release_save", release_and_interrupt)
        with pytest.raises(_LeftError):
            CallQueue().do("step", lambda _: None)
    gate.set()


def test_a_thread_that_cannot_start_is_told_while_another_error_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_named: Any) -> None:
        raise RuntimeError("can't start new thread")

    def try_to_start() -> None:
        with pytest.raises(ResourceError, match="step: no thread can be started"):
            CallQueue().do("step", lambda _: None)

    monkeypatch.setattr(threading, STARTS, types.FunctionType(refuse.__code__, vars(threading)))  # a part of threading
    try_to_start()
    try:
        raise ValueError
    except ValueError:
        try_to_start()


PACKAGE = Path(hvd.__file__).parent
OWN = Path(private.__file__)
LAST = {name.rpartition(".")[2] for name in private.PRIVATE_NAMES} - {"add", "apply", "hooked"} | {"found_inf"}


def spelled(path: Path) -> Iterator[str]:
    """The undocumented names of torch in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            if node.attr in LAST or (
                whole.startswith("torch.") and node.attr.startswith("_") and node.attr[:2] != "__"
            ):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            yield from (alias.name for alias in node.names if f".{node.module}.{alias.name}".count("._"))
        elif isinstance(node, ast.Constant) and (node.value in LAST or str(node.value).startswith("torch._")):
            yield str(node.value)


def test_one_module_has_the_undocumented_names_of_torch() -> None:
    others = {path: set(spelled(path)) - set(private.READ_IN_PLACE) for path in PACKAGE.rglob("*.py") if path != OWN}
    assert {path.name: names for path, names in others.items() if names} == {}
    own = set(spelled(OWN))
    assert set(private.READ_IN_PLACE) < LAST
    assert own | {"_version"} >= LAST


def found(name: str) -> Any:
    """The thing of torch under a name; AttributeError or ImportError without it."""
    torch.optim.SGD([torch.zeros(1)])  # the first one gives its class the hooks
    parts = name.split(".")
    thing: Any = torch
    for number, part in enumerate(parts[1:], 1):
        if part == "_dynamo":
            __import__(".".join(parts[: number + 2]))
        if part == "_torchdynamo_disable":
            thing = thing(lambda: None)
        thing = getattr(thing([torch.zeros(1)]) if part == "_optimizer_step_pre_hooks" else thing, part)
    return thing


def test_the_torch_of_tests_imports_a_part_of_dynamo_once() -> None:
    """Dynamo waits until something of it is wanted: here by the import of a part, which its own import has loaded."""
    done = run_python("-c", "import torch; torch.optim.SGD([torch.zeros(1)]); import torch._dynamo.decorators")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", private.PRIVATE_NAMES)
def test_this_torch_has_the_name(name: str) -> None:
    if name.endswith("in_compiled_autograd_region") and torch.__version__ < "2.6":
        pytest.skip("this torch has another compiled autograd (`make test TORCH=torch==2.13.0`)")
    found(name)


def test_without_numbers_of_runs_gradients_are_reduced_at_the_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert private.tells_end_of_backward()
    model = torch.nn.Linear(1, 1)
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    for owner, name in ((torch._C, "_current_graph_task_id"), (torch._C, "_current_autograd_node")):
        with monkeypatch.context() as patch:
            patch.delattr(owner, name)
            assert not private.tells_end_of_backward()
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.Variable, "_execution_engine", SimpleNamespace(other=engine))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(hvd.UnsupportedError, match=r"does not tell when a backward ends; .*'step'"):
            hvd.DistributedOptimizer(optimizer, gradients_ready="backward")
        hvd.DistributedOptimizer(optimizer, gradients_ready="step")
    with monkeypatch.context() as patch:
        patch.delattr(torch._C, "_current_graph_task_id")
        assert private.run_number()() == -1


MADE_OF = [
    (private.code_of_function_backward, torch.autograd.function, "BackwardCFunction"),
    (private.owner_counter, torch._C, "_storage_Use_Count"),
    (private.code_of_hooked_step, torch.optim.Optimizer, "profile_hook_step"),
]


@pytest.mark.parametrize(("make", "owner", "name"), MADE_OF, ids=[name for *_, name in MADE_OF])
def test_what_is_made_of_a_name_is_none_without_it(
    make: Callable[[], Any], owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make() is not None
    monkeypatch.delattr(owner, name)
    assert make() is None


def test_older_torch_knows_no_transforms_and_counts_changes_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    torch.func.vmap(lambda row: asked.append(private.transform_finder()(row)) or row)(torch.ones(1, 2))
    monkeypatch.setattr(private, "torch", SimpleNamespace(_C=SimpleNamespace()))
    torch.func.vmap(lambda row: asked.append(private.transform_finder()(row)) or row)(torch.ones(1, 2))
    assert asked == [True, False]
    as_before = {"inference_mode": torch.inference_mode, "empty": torch.empty}
    monkeypatch.setattr(private, "torch", SimpleNamespace(_C=SimpleNamespace(), **as_before))  # torch itself calls it
    tensors = [torch.zeros(1), torch.zeros(2)]
    private.change_counter()(tensors)
    assert [tensor._version for tensor in tensors] == [1, 1]


def test_storages_have_keys_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.zeros(4)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "untyped_storage", lambda self: SimpleNamespace(data_ptr=self.data_ptr))
        assert private.storage_key(base) == private.storage_key(base[:2]) == base.data_ptr()


def test_a_sparse_tensor_is_coalesced() -> None:
    class Coalesced:
        def coalesce(self) -> torch.Tensor:
            return torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), check_invariants=True).coalesce()

    tensor: Any = Coalesced()
    assert private.sparse_indices(tensor).tolist() == [[1]]
    assert private.sparse_values(tensor).tolist() == [5.0]


def test_without_marks_of_torch_there_are_no_spans_and_optimizers_are_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.autograd.profiler, "_is_profiler_enabled")
    assert private.profiler_state()._is_profiler_enabled is False

    class Unhooked(torch.optim.Optimizer):
        def __init__(self) -> None:
            pass

    assert not private.has_step_hooks(Unhooked())
    with monkeypatch.context() as patch:
        patch.delattr(torch.optim.SGD.step, "hooked")
        patch.setattr(torch.optim.Optimizer, "_patch_step_function", lambda self: None)
        assert private.has_step_hooks(Unhooked())


def test_older_torch_skips_code_otherwise_and_has_no_compiled_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped: list[Any] = []
    frames = SimpleNamespace(skip_code=skipped.append)
    for namespace in (SimpleNamespace(_dynamo=SimpleNamespace(eval_frame=frames)), SimpleNamespace()):
        monkeypatch.setattr(private, "torch", SimpleNamespace(_C=namespace))
        private.code_skipper()(spelled.__code__)
    assert skipped == [spelled.__code__]
    monkeypatch.setitem(sys.modules, "torch._dynamo.compiled_autograd", SimpleNamespace())  # type: ignore[arg-type]
    assert private.is_autograd_compiled() is False


def test_a_scaler_that_calls_the_step_otherwise_is_not_seen() -> None:
    def _maybe_opt_step() -> bool:
        return private.calls_scaled_step(sys._getframe())

    def other() -> bool:
        return private.calls_scaled_step(sys._getframe())

    assert (_maybe_opt_step(), other()) == (True, False)
    assert not private.is_unscaled(torch.optim.SGD([torch.zeros(1)]))


def test_the_base_of_batch_norms_is_found_without_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    base = private.batch_norm()
    monkeypatch.delattr(torch.nn.modules.batchnorm, "_BatchNorm")
    assert private.batch_norm() is base is torch.nn.BatchNorm2d.__mro__[1]


def test_owners_have_about_equal_loads_and_frozen_parameters_none() -> None:
    loads = [0, 0, 0]
    sizes = [1 << 20] * 7 + [100] * 50 + [0] * 4
    owners = share_out(sizes, loads)
    assert max(loads) - min(loads) <= (1 << 20) + LOAD_OF_TENSOR
    assert sum(loads) == sum(size + LOAD_OF_TENSOR for size in sizes if size)
    assert share_out(sizes, [0, 0, 0]) == owners
    later = share_out([100], loads)
    assert loads[later[0]] == min(loads) + 100 + LOAD_OF_TENSOR or loads[later[0]] <= max(loads) + LOAD_OF_TENSOR + 100


def _give(giver: FileGiver, takers: int, **options: Any) -> None:
    memory = create_memory(4096)
    try:
        giver.give(memory, takers, options.get("timeout_s", 20.0), options.get("check", lambda: None))
    finally:
        os.close(memory)
        giver.close()


def test_strangers_get_nothing_and_takers_the_file() -> None:
    giver = FileGiver()
    thread = threading.Thread(target=_give, args=(giver, 2))
    thread.start()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(giver.address.name)
        stranger.sendall(bytes(32))
        assert stranger.recv(1) == b""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(giver.address.name)
    for _ in range(2):
        taken = take_file(giver.address, 20.0)
        assert os.fstat(taken).st_size == 4096
        os.close(taken)
    thread.join()
    with pytest.raises(ResourceError, match=r"^shared memory did not come from the first rank of this host: "):
        take_file(giver.address, 20.0)


def test_a_giver_gives_up() -> None:
    with pytest.raises(ResourceError, match=r"^3 of 3 ranks did not come for shared memory$"):
        _give(FileGiver(), 3, timeout_s=0.0)
    with pytest.raises(ResourceError, match=r"^the job has ended$"):
        _give(FileGiver(), 3, check=Mock(side_effect=ResourceError("the job has ended")))


def test_a_process_of_another_user_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    giver = FileGiver()
    monkeypatch.setattr(passed_file, "check_user", Mock(side_effect=HandshakeError("it belongs to user 7")))
    with pytest.raises(ResourceError, match="it belongs to user 7"):
        take_file(giver.address, 20.0)
    giver.close()


def test_no_socket_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    giver = FileGiver()
    monkeypatch.setattr(passed_file.secrets, "token_hex", lambda _: giver.address.name.decode().removeprefix("\0horo-"))
    with pytest.raises(ResourceError, match=r"^cannot listen on an abstract unix socket: Address already in use$"):
        FileGiver()
    giver.close()
    with pytest.raises(ResourceError, match="did not come"):
        take_file(FileAddress(b"\0horo-nobody", b""), 1.0)


def test_hosts_compare_now_and_then_and_must_be_alike() -> None:
    assert [step for step in range(1, 4000) if is_compared(step)] == [*(2**n for n in range(11)), 2048, 3072]
    own = arithmetic()
    assert own[0] == torch.__version__
    refuse_unlike({0: own, 3: own})
    with pytest.raises(UnsupportedError, match=r"processor .* at rank 0, another at rank 3, so hosts may compute diff"):
        refuse_unlike({0: own, 3: (*own[:2], "another")})
