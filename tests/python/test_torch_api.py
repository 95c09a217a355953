"""The surface of ``horo.torch``, with all names of Horovod, and what one process can check of it alone."""

import copy
import importlib
import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from jobs import IMPORT_TORCH_SILENTLY, as_users_start, run_python, wait_until

import horo.torch as hvd
from horo import errors
from horo.errors import NotInitializedError, UsageError

EXPORTS = (
    "AbortedError Adasum Average Compression DeadlockError DistributedOptimizer GroupError Handle HoroError "
    "HorovodInternalError InternalError LearningRateWarmup Max MetricAverage Min MismatchError NotInitializedError "
    "PeerLostError ProcessSet Product ReduceOp "
    "ResourceError StalledError Sum SyncBatchNorm UnsupportedError UsageError add_process_set allgather "
    "allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async "
    "average_buffers barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object "
    "broadcast_optimizer_state broadcast_parameters ccl_built config cross_rank cross_size cuda_built ddl_built "
    "distribute global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce "
    "grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter "
    "grouped_reducescatter_async init is_homogeneous is_initialized join local_rank local_size mpi_built "
    "mpi_enabled mpi_threads_supported nccl_built no_sync poll rank reducescatter reducescatter_async "
    "remove_process_set rocm_built shard shutdown size sparse_allreduce_async start_timeline stats "
    "stop_timeline synchronize"
)

REDUCE = "tensor average name op prescale_factor postscale_factor process_set"
COMPRESSED = "tensor average name compression op prescale_factor postscale_factor process_set"
ARGUMENTS = {
    "allreduce": COMPRESSED,
    **dict.fromkeys(["allreduce_", "allreduce_async", "allreduce_async_"], REDUCE),
    "grouped_allreduce": COMPRESSED.replace("tensor", "tensors"),
    **dict.fromkeys(
        ["grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"],
        REDUCE.replace("tensor", "tensors"),
    ),
    **dict.fromkeys(["allgather", "allgather_async"], "tensor name process_set"),
    **dict.fromkeys(["grouped_allgather", "grouped_allgather_async"], "tensors name process_set"),
    **dict.fromkeys(
        ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_"], "tensor root_rank name process_set"
    ),
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "reducescatter_async": "tensor name op process_set prescale_factor postscale_factor",
    "grouped_reducescatter": "tensors name compression op process_set prescale_factor postscale_factor",
    "grouped_reducescatter_async": "tensors name op process_set prescale_factor postscale_factor",
    "sparse_allreduce_async": "tensor name op process_set",
    "SyncBatchNorm": "num_features eps momentum affine track_running_stats process_set factory",
    **dict.fromkeys(["alltoall", "alltoall_async"], "tensor splits name process_set"),
    "barrier": "process_set",
    "join": "device",
    **dict.fromkeys(["poll", "synchronize"], "handle"),
    "average_buffers": "model process_set",
    "broadcast_parameters": "params root_rank process_set",
    "broadcast_optimizer_state": "optimizer root_rank model process_set",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name process_set",
    "init": "comm process_sets device settings",
    "start_timeline": "file_path mark_cycles",
    "stop_timeline": "",
    "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op "
    "gradient_predivide_factor num_groups groups sparse_as_dense process_set gradients_ready sharding",
}


@pytest.fixture
def alone() -> Iterator[None]:
    """A job of one rank in this process."""
    hvd.init()
    yield
    hvd.shutdown()


def test_the_export_list_is_exactly_this() -> None:
    assert hvd.__all__ == EXPORTS.split()
    assert all(hasattr(hvd, name) for name in EXPORTS.split())


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_come_in_horovods_order(name: str) -> None:
    own = ["out"] if name in ("allgather", "alltoall", "broadcast", "reducescatter") else []
    assert list(inspect.signature(getattr(hvd, name)).parameters) == [*ARGUMENTS[name].split(), *own]


def test_reductions_have_horovods_numbers_and_are_shown_and_kept_as_what_they_are() -> None:
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)
    assert [*hvd.ReduceOp] == [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert {1: "found"}[hvd.Sum] == "found"
    assert f"{hvd.Sum} {hvd.Adasum!r} {[hvd.Max]}" == "hvd.Sum hvd.Adasum [hvd.Max]"
    for kept in (pickle.loads(pickle.dumps(hvd.Sum)), copy.deepcopy(hvd.Sum)):
        assert kept is hvd.Sum


PLACE = [hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size, hvd.is_homogeneous]
BEFORE_INIT: list[Callable[[], Any]] = [
    *PLACE, hvd.mpi_threads_supported, hvd.barrier, lambda: hvd.allreduce(torch.ones(1)),
    lambda: hvd.allreduce_async_(torch.ones(1)), lambda: hvd.allgather(torch.ones(1)),
    lambda: hvd.broadcast(torch.ones(1), 0), lambda: hvd.poll(1), lambda: hvd.synchronize(1),
    lambda: hvd.average_buffers(torch.nn.BatchNorm1d(2)), lambda: hvd.broadcast_parameters({}, 0),
    lambda: hvd.broadcast_object(1), lambda: hvd.allgather_object(1),
    lambda: hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1)], lr=0.1)),
]  # fmt: skip


@pytest.mark.parametrize("call", BEFORE_INIT)
def test_everything_before_init_says_to_call_init(call: Callable[[], Any]) -> None:
    assert not hvd.is_initialized()
    with pytest.raises(NotInitializedError, match=r"call hvd\.init\(\) first") as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, hvd.HorovodInternalError)


def test_shutdown_before_init_does_nothing_and_the_global_set_is_empty_handed() -> None:
    hvd.shutdown()
    assert not hvd.is_initialized()
    found = hvd.global_process_set
    assert (found.ranks, found.size(), found.rank(), found.included()) == (None, None, None, None)


def test_horovods_object_behind_its_functions_has_them() -> None:
    basics = hvd.mpi_ops._basics
    with pytest.raises(NotInitializedError):
        basics.size()
    basics.init(process_sets=[])
    assert (basics.is_initialized(), basics.size(), basics.local_rank(), basics.is_homogeneous()) == (True, 1, 0, True)
    assert (basics.nccl_built(), basics.gloo_built()) == (hvd.nccl_built(), hvd.gloo_built())
    assert basics._get_process_set_ids_and_ranks() == {0: [0]}
    basics.shutdown()
    assert not hvd.is_initialized()


def test_a_handle_is_an_integer_that_can_be_waited_for_and_is_in_horovods_map(alone: None) -> None:
    handle = hvd.allreduce_async(torch.ones(2), name="waited for", op=hvd.Sum)
    assert isinstance(handle, int) and isinstance(handle, hvd.Handle)
    wait_until(handle.done, "the end of the operation")
    assert handle.wait().tolist() == [1.0, 1.0]
    with pytest.raises(UsageError, match=f"Handle {int(handle)} was not created or has been cleared"):
        handle.wait()
    pending = hvd.mpi_ops._handle_map
    assert not pending
    first, second = (hvd.allreduce_async(torch.ones(1), name=name) for name in ("first", "second"))
    assert {**pending} == {first: "allreduce.first", second: "allreduce.second"}
    hvd.synchronize(first)
    assert (list(pending), first in pending, len(pending)) == ([second], False, 1)
    with pytest.raises(KeyError):
        pending[first]
    hvd.shutdown()
    assert not pending


def test_a_plain_process_is_a_job_of_one(alone: None) -> None:
    assert (hvd.rank(), hvd.local_rank(), hvd.cross_rank()) == (0, 0, 0)
    assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (1, 1, 1)
    assert hvd.is_homogeneous()
    own = torch.arange(6.0).reshape(2, 3)
    for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
        assert torch.equal(hvd.allreduce(own, op=op), own)
    assert torch.equal(hvd.allgather(own), own)
    assert torch.equal(hvd.broadcast(own, 0), own)
    assert hvd.broadcast_object({"a": 1}) == {"a": 1}
    assert hvd.allgather_object("x") == ["x"]
    hvd.broadcast_parameters({"own": own}, 0)
    hvd.barrier()


def test_a_process_that_does_not_call_shutdown_ends_well() -> None:
    code = "import horo.torch as hvd; hvd.init(); h = hvd.allreduce_async(torch.ones(5)); print(hvd.size())"
    result = run_python("-c", IMPORT_TORCH_SILENTLY + code, env=as_users_start())
    assert (result.returncode, result.stdout, result.stderr) == (0, "1\n", "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0], r"ProcessSet\(0\): expected the ranks of the members, as integers"),
        ("static", r"init\(process_sets='static'\): expected a list of process sets, or 'dynamic'"),
        (3, r"init\(process_sets=3\): expected a list of process sets, or 'dynamic'"),
        ([[0]], r"process_sets entry number 0 is a duplicate: ProcessSet\(.*ranks=\[0\]"),
        ([[0, 1]], r"ranks=\[0, 1\].* has a rank that a job of 1 ranks does not have"),
        ([[0, 0]], r"ProcessSet\(\[0, 0\]\): a process set has one or more ranks from 0, each once"),
        ([[-1]], r"ProcessSet\(\[-1\]\): a process set has one or more ranks from 0, each once"),
        ([[]], r"ProcessSet\(\[\]\): a process set has one or more ranks from 0, each once"),
        ([["a"]], r"ProcessSet\(\['a'\]\): expected the ranks"),
    ],
)
def test_process_sets_that_cannot_be_are_refused_by_init(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hvd.init(process_sets=given)
    assert not hvd.is_initialized()


def test_a_process_alone_may_say_that_process_sets_come_later() -> None:
    hvd.init(process_sets="dynamic")
    try:
        with pytest.raises(ValueError, match="there is a process set of these ranks already"):
            hvd.add_process_set([0])
        with pytest.raises(ValueError, match="horo is initialized already; use"):
            hvd.init(process_sets=[[0]])
    finally:
        hvd.shutdown()
    with pytest.raises(NotInitializedError):
        hvd.add_process_set([0])


def test_a_list_of_the_only_rank_is_a_job_and_another_list_is_none() -> None:
    with pytest.raises(ValueError, match="1 is no rank of this job, which has ranks 0 to 0"):
        hvd.init([0, 1])
    with pytest.raises(ValueError, match=r"a communicator of mpi4py \(MPI.Comm\), not a int"):
        hvd.init(comm=0)
    assert not hvd.is_initialized()
    hvd.init([0])
    assert (hvd.rank(), hvd.size()) == (0, 1)
    hvd.shutdown()


def test_what_is_no_process_set_is_refused(alone: None) -> None:
    found = hvd.global_process_set
    assert (found.process_set_id, found.ranks, found.size(), found.rank(), found.included()) == (0, [0], 1, 0, True)
    other: Any = object()
    for call in (
        lambda: hvd.allreduce(torch.ones(1), process_set=other),
        lambda: hvd.allgather(torch.ones(1), process_set=other),
        lambda: hvd.broadcast(torch.ones(1), 0, process_set=other),
        lambda: hvd.barrier(process_set=other),
        lambda: hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1)], lr=1.0), process_set=other),
    ):
        with pytest.raises(ValueError, match="process_set"):
            call()


def test_what_is_built_is_told_truthfully(alone: None) -> None:
    code = "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI"  # starts no MPI
    assert hvd.mpi_built() is (run_python("-c", code).returncode == 0)
    with pytest.raises(ValueError, match="did not start through MPI"):
        hvd.mpi_threads_supported()
    for function in (hvd.mpi_enabled, hvd.gloo_enabled, hvd.gloo_built, hvd.ddl_built, hvd.ccl_built, hvd.rocm_built):
        assert function() is False
    # as tests/python/test_imports.py shows with what is there and what is not
    assert isinstance(hvd.cuda_built(), bool)
    assert isinstance(hvd.nccl_built(), int)


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)


BAD_TENSORS: list[tuple[Any, str]] = [
    (_quantized(), r"dtype torch\.qint8 is not supported; use tensor\.int_repr\(\)"),
    (torch.eye(2).to_sparse(), r"torch\.sparse_coo tensors are not supported here; use tensor\.to_dense"),
]


@pytest.mark.parametrize(("tensor", "message"), BAD_TENSORS)
def test_tensors_that_cannot_be_sent_are_described(alone: None, tensor: Any, message: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(tensor),
        lambda: hvd.allreduce_async_(tensor, name="n"),
        lambda: hvd.grouped_allreduce([torch.ones(1), tensor]),
        lambda: hvd.broadcast(tensor, 0),
        lambda: hvd.allgather(tensor),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=message):
            call()


BAD_CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: hvd.allreduce(torch.ones(1), op="Sum"), "op='Sum' is not a reduction"),  # type: ignore[arg-type]
    (lambda: hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1)], lr=1.0), op=True), "op=True is not a reduction"),
    (lambda: hvd.allreduce(torch.ones(1), postscale_factor="2"), "must be one real number, not '2'"),  # type: ignore[arg-type]
    (
        lambda: hvd.grouped_allreduce([torch.ones(1)], prescale_factor=torch.ones(2)),  # type: ignore[arg-type]
        r"prescale_factor must be one real number, not a tensor of torch.float32 \[2\]",
    ),
    (lambda: hvd.allreduce(torch.ones(1), name=3), "allreduce: name must be a string"),  # type: ignore[arg-type]
    (lambda: hvd.allreduce(torch.ones(1), name="a\0b"), "without NUL characters"),
    (lambda: hvd.allgather(torch.ones(1), name="a\ud800b"), r"lone surrogates, not 'a\\ud800b'"),
    (lambda: hvd.grouped_allreduce(torch.ones(2)), "expected a list of tensors, not one tensor"),  # type: ignore[arg-type]
    (lambda: hvd.allreduce_(torch.ones(1).expand(3)), "an expanded tensor cannot be written in place"),
    (lambda: hvd.allreduce(torch.ones(1), name="x" * 1100), "bytes; 1 to 1023 are allowed"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_bad_arguments_get_one_clear_sentence(alone: None, call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_deprecated_argument_warns_exactly_once_per_call(alone: None) -> None:
    calls = [
        lambda: hvd.allreduce(torch.ones(2), average=True),
        lambda: hvd.allreduce_(torch.ones(2), average=False),
        lambda: hvd.synchronize(hvd.allreduce_async(torch.ones(2), average=True)),
        lambda: hvd.synchronize(hvd.allreduce_async_(torch.ones(2), average=True)),
        lambda: hvd.grouped_allreduce([torch.ones(2), torch.ones(1)], average=True),
        lambda: hvd.grouped_allreduce_([torch.ones(2), torch.ones(1)], average=True),
        lambda: hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(2)], average=True)),
        lambda: hvd.synchronize(hvd.grouped_allreduce_async_([torch.ones(2)], average=True)),
        lambda: len(_wrap(_parameters(5), num_groups=2)._reducer._groups) == 2 or pytest.fail("not in two groups"),
    ]
    for call in calls:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            call()
        assert [each.category for each in seen] == [DeprecationWarning]
        assert seen[0].filename == __file__


def test_an_in_place_operation_tells_autograd(alone: None) -> None:
    tensor = torch.ones(2)
    for call in (lambda: hvd.allreduce_(tensor), lambda: hvd.synchronize(hvd.broadcast_async_(tensor, 0))):
        before = tensor._version
        assert call() is tensor
        assert tensor._version > before
    with torch.inference_mode():
        inference = torch.ones(2)
        assert hvd.allreduce_(inference) is inference


def test_results_of_an_allgather_can_be_written_and_outlive_the_job(alone: None) -> None:
    result = hvd.allgather(torch.ones(1000))
    hvd.shutdown()
    result.add_(1)
    assert result.sum().item() == 2000


def _parameters(count: int = 2) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]


def _wrap(parameters: Any = None, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters or _parameters(), lr=0.1), **options)


OWN = _parameters()
BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"named_parameters": [torch.ones(1)]}, r"must yield \(name, parameter\) tuples"),
    ({"named_parameters": [("a", OWN[0]), ("a", OWN[1])]}, "names more than once: a"),
    ({"named_parameters": [("a", OWN[0])]}, r"lacks parameter 1 of group 0 of the optimizer, of shape \[2\]"),
    ({"backward_passes_per_step": 0}, "backward_passes_per_step must be positive, not 0"),
    ({"op": hvd.Max}, "is not supported; use hvd.Average, Sum or Adasum"),
    ({"op": hvd.Adasum, "groups": 2}, "groups=2 is about gradients, and op=Adasum combines the steps"),
    ({"op": hvd.Adasum, "gradients_ready": "step"}, "gradients_ready='step' is about gradients"),
    ({"op": hvd.Adasum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor needs op=Average"),
    ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor needs op=Average"),
    ({"compression": "fp16"}, r"compression must be a Compressor such as hvd\.Compression\.fp16, not "),
    ({"gradients_ready": "now"}, "gradients_ready must be 'backward' or 'step', not 'now'"),
    ({"gradient_predivide_factor": -1.0}, "gradient_predivide_factor must be positive, not -1.0"),
    ({"groups": -1}, "groups must be a number that is not negative, or a list of lists"),
    ({"groups": "x"}, "groups must be a number"),
    ({"groups": [OWN[0]]}, "groups must be a number that is not negative, or a list of lists"),
    ({"groups": [[1]]}, "groups must hold parameters"),
    ({"groups": [[OWN[0]], [OWN[0]]]}, "groups has a parameter more than once"),
    ({"groups": [[OWN[0]], [torch.ones(5)]]}, r"groups\[1\] has a tensor of shape \[5\] that the optimizer lacks"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_of_the_optimizer_are_named(alone: None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _wrap(OWN, **options)


def test_an_optimizer_is_wrapped_once_and_must_be_one(alone: None) -> None:
    optimizer = _wrap()
    with pytest.raises(UsageError, match="distributed already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(UsageError, match=r"expected a torch\.optim\.Optimizer, not int"):
        hvd.DistributedOptimizer(3)  # type: ignore[type-var]
    with pytest.raises(UsageError, match=r"not a model \(Linear\).*Optimizer\(optimizer, model\)"):
        hvd.DistributedOptimizer(torch.nn.Linear(1, 1), torch.optim.SGD(_parameters(), lr=0.1))  # type: ignore[type-var]


def test_an_optimizer_alone_trains_as_usual(alone: None) -> None:
    parameters = _parameters()
    optimizer = _wrap(parameters, named_parameters=[("a", parameters[0]), ("b", parameters[1])])
    assert isinstance(optimizer, torch.optim.SGD)
    assert set(optimizer._parameter_names.values()) == {"a", "b"}
    assert (optimizer.op, optimizer.process_set) == (hvd.Average, hvd.global_process_set)
    assert (optimizer.backward_passes_per_step, dict(optimizer._handles)) == (1, {})
    assert set(optimizer._requires_update) == set(parameters)
    assert optimizer.find_duplicates(["a", "b", "a"]) == {"a"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            (parameters[0] * 3).sum().backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
    torch.testing.assert_close(parameters[0].detach(), torch.full((2,), 1 - 2 * 0.3))
    assert parameters[1].grad is None
    with pytest.raises(UsageError, match="backward_passes_per_step must be positive, not 0"):
        optimizer.set_backward_passes_per_step(0)


@pytest.mark.parametrize("device", ["cpu", "gpu 1", "cuda:256", -1, 128, 1 << 40, 1.5, True, ["cuda"]], ids=str)
def test_a_device_that_is_no_gpu_or_has_a_number_that_torch_would_cut(device: Any) -> None:
    with pytest.raises(UsageError, match=r"^init\(device=.*\): expected a GPU, such as 'cuda:1' or 1$"):
        hvd.init(device=device)
    assert not hvd.is_initialized()


@pytest.mark.parametrize("name", ["elastic", "mpi_ops", "_check_has_gpu"])
def test_names_that_a_star_import_does_not_bring_are_there(name: str) -> None:
    exec(f"from horo.torch import {name}")


def test_what_horovod_does_not_have_either_is_pythons_own_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'horo\.torch' has no attribute 'allredcue'"):
        hvd.allredcue  # noqa: B018
    with pytest.raises(ImportError, match=r"cannot import name 'allredcue' from 'horo\.torch'"):
        exec("from horo.torch import allredcue")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("horo.torch.no_such_module")


@pytest.mark.parametrize("name", ["torch", "init", "rank"])
def test_the_package_alone_says_what_a_script_imports(name: str) -> None:
    code = f"import horo; horo.{name}"
    done = run_python("-c", code)
    said = f"AttributeError: module 'horo' has no attribute '{name}'; the calls of a training script: "
    assert done.stderr.splitlines()[-1] == said + "import horo.torch as hvd"


NOT_IN_MPI_OPS = """
DistributedOptimizer Handle LearningRateWarmup MetricAverage ReduceOp SyncBatchNorm allgather_object average_buffers
broadcast_object broadcast_optimizer_state broadcast_parameters config distribute no_sync shard stats
"""


def test_mpi_ops_has_the_same_operations_and_what_only_horovods_has() -> None:
    names = set(hvd.__all__) - set(errors.__all__) - set(NOT_IN_MPI_OPS.split()) | {"HorovodInternalError"}
    assert set(hvd.mpi_ops.__all__) - {"handle_average_backwards_compatibility"} == names
    assert all(getattr(hvd.mpi_ops, name) is getattr(hvd, name) for name in names)
    assert hvd.mpi_ops.handle_average_backwards_compatibility(hvd.Sum, None) == hvd.Sum
    assert hvd.mpi_ops.handle_average_backwards_compatibility(None, None) == hvd.Average
    with pytest.raises(AttributeError, match=r"^module 'horo\.torch\.mpi_ops' has no attribute 'x'"):
        hvd.mpi_ops.x  # noqa: B018
