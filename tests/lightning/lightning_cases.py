"""What each of two ranks does with Lightning, and what must hold there. Only ranks load this: Lightning takes seconds.

Samples are dealt out in turn: rank r of two has those with the numbers r, r + 2, ... So batch number b of both ranks
together is batch number b of one process that has batches of twice the size, up to the order of its samples.
"""

from __future__ import annotations

import copy
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import horo.lightning
import horo.torch as hvd
from horo.errors import GroupError, ResourceError, UnsupportedError, UsageError
from horo.lightning.place import devices_of_ranks

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")
BATCH = 4
INPUTS, TARGETS = torch.randn(32, 4, generator=torch.Generator().manual_seed(1)), torch.arange(32.0)[:, None] / 16
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
}


def data() -> DataLoader[Any]:
    """In order; where a script gives no such sampler, Lightning deals samples out in another order each epoch."""
    samples = TensorDataset(INPUTS, TARGETS)
    own = DistributedSampler(samples, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    return DataLoader(samples, batch_size=BATCH, sampler=own)


def network(*, normed: bool = False) -> nn.Sequential:
    """The same on all ranks."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3) if normed else nn.Tanh(), nn.Linear(3, 1))


class Module(pl.LightningModule):
    """Learns by SGD with momentum and a learning rate that halves each epoch; other numbers on each rank at first."""

    def __init__(self, *, normed: bool = False) -> None:
        super().__init__()
        self.net = network(normed=normed)
        with torch.no_grad():
            self.net[0].weight.add_(hvd.rank())

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Validated(Module):
    def validation_step(self, batch: Any, _: int) -> None:
        self.log("loss", (self.net(batch[0]) - batch[1]).square().mean(), sync_dist=True)


def fit(module: pl.LightningModule, *data_of: Any, **options: Any) -> pl.Trainer:
    trainer = pl.Trainer(**{**QUIET, "strategy": "horo", "max_epochs": 2, **options})
    trainer.fit(module, *(data_of or (data(),)))
    return trainer


def values(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All numbers in a row; they are equal to the bit on all ranks."""
    row = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])
    everyone = hvd.allgather(row[None])
    assert (everyone == row).all(), everyone
    return row


def alone(
    *, epochs: int = 2, passes: int = 1, clip: float | None = None, normed: bool = False, restarted: bool = False
) -> nn.Sequential:
    """The network after one process has learned from the batches of both ranks together.

    ``restarted``: with a new optimizer and schedule for each epoch.
    """
    net = network(normed=normed)
    for epoch in range(epochs):
        if epoch == 0 or restarted:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        pairs = zip(INPUTS.split(2 * BATCH), TARGETS.split(2 * BATCH), strict=True)
        for number, (inputs, targets) in enumerate(pairs, 1):
            ((net(inputs) - targets).square().mean() / passes).backward()
            if number % passes == 0:
                if clip:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
    return net


def check_equals_one_process(**options: Any) -> None:
    module = Module()
    trainer = fit(module, **options)
    passes = options.get("accumulate_grad_batches", 1)
    expected = alone(passes=passes, clip=options.get("gradient_clip_val"))
    assert trainer.global_step == 2 * 4 // passes
    torch.testing.assert_close(values(module.parameters()), values(expected.parameters()), rtol=1e-5, atol=1e-6)


def case_ranks_learn_as_one_process(_: Path) -> None:
    check_equals_one_process()


def case_random_numbers_of_a_fit_are_those_of_the_seed_on_all_ranks(_: Path) -> None:
    class Drawing(Module):
        def setup(self, stage: str) -> None:
            self.drawn = torch.rand(1)

    module = Drawing()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_GLOBAL_SEED", "7")  # as seed_everything(7) does
        torch.rand(1 + hvd.rank())
        fit(module, max_epochs=1)
    assert module.drawn == torch.rand(1, generator=torch.Generator().manual_seed(7))


def case_each_sample_is_of_one_rank(_: Path) -> None:
    class Taking(Module):
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            taken.append(batch[1][:, 0])
            return super().training_step(batch, number)

    taken: list[torch.Tensor] = []
    fit(Taking(), DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=BATCH), max_epochs=1)
    assert sorted(hvd.allgather(torch.cat(taken)).tolist()) == TARGETS[:, 0].tolist()


def case_accumulation_and_clipping_are_those_of_one_process(_: Path) -> None:
    check_equals_one_process(accumulate_grad_batches=2, gradient_clip_val=0.5)


def case_a_compiled_module_learns_as_one_process(_: Path) -> None:
    module = Module()
    fit(torch.compile(module, backend="eager"))
    torch.testing.assert_close(values(module.parameters()), values(alone().parameters()), rtol=1e-5, atol=1e-6)


def case_old_name_and_an_object_with_options_select_the_strategy(_: Path) -> None:
    check_equals_one_process(strategy="horovod")
    check_equals_one_process(strategy="bagua")
    given = horo.lightning.HoroStrategy(buffers="local", groups=1, gradient_predivide_factor=2.0)
    check_equals_one_process(strategy=given)


def case_ranks_step_shares_and_a_checkpoint_of_them_is_one_of_all(folder: Path) -> None:
    def strategy() -> Any:
        return horo.lightning.HoroStrategy(sharding="optimizer")

    assert hasattr(fit(Module(), strategy=strategy()).optimizers[0], "_sharded_step")
    check_equals_one_process(strategy=strategy(), accumulate_grad_batches=2, gradient_clip_val=0.5)
    case_one_checkpoint_and_a_resumed_run_is_one_that_went_on(folder, strategy)


def case_bf16_mixed_keeps_ranks_equal(_: Path) -> None:
    module = Module()
    fit(module, precision="bf16-mixed")
    torch.testing.assert_close(values(module.parameters()), values(alone().parameters()), rtol=0.1, atol=0.05)


def case_sync_batchnorm_is_one_process_with_the_whole_batch(_: Path) -> None:
    kinds = []

    class Watched(Module):
        def on_train_start(self) -> None:
            kinds.append(type(self.net[1]))

    module = Watched(normed=True)
    own = module.net[1]
    fit(module, sync_batchnorm=True)
    expected = alone(normed=True)
    assert kinds == [hvd.SyncBatchNorm]
    assert module.net[1] is own
    for found, wanted in ((module.parameters(), expected.parameters()), (module.buffers(), expected.buffers())):
        torch.testing.assert_close(values(found), values(wanted), rtol=1e-4, atol=1e-5)


def case_buffers_are_averaged_before_validation_and_in_checkpoints(folder: Path) -> None:
    class Watched(Validated):
        def validation_step(self, batch: Any, number: int) -> None:
            super().validation_step(batch, number)
            self.validated = copy.deepcopy(self.net[1].running_mean)

    def saved(trainer: pl.Trainer, name: str) -> torch.Tensor:
        trainer.save_checkpoint(folder / name)
        mean: torch.Tensor = torch.load(folder / name, weights_only=False)["state_dict"]["net.1.running_mean"]
        return mean

    means: dict[str, torch.Tensor] = {}
    for how in ("local", "broadcast", "average"):
        module = Watched(normed=True)
        strategy = horo.lightning.HoroStrategy(buffers=how)
        trainer = fit(module, data(), data(), strategy=strategy, max_epochs=1)
        means[how] = hvd.allgather(module.validated[None])
        assert (saved(trainer, how) == means[how][0]).all()
    assert (means["local"][0] != means["local"][1]).any()
    assert (means["broadcast"] == means["local"][0]).all()
    assert (means["average"][0] == means["average"][1]).all()
    torch.testing.assert_close(means["average"][0], means["local"].mean(0))
    torch.testing.assert_close(saved(fit(Module(normed=True), max_epochs=1), "unvalidated"), means["average"][0])


def case_metrics_are_over_all_ranks(_: Path) -> None:
    class Measured(Validated):
        def __init__(self) -> None:
            super().__init__()
            self.ranks, self.inputs = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
            self.collection = torchmetrics.MetricCollection({"most": torchmetrics.MaxMetric()})

        def on_validation_start(self) -> None:
            self.late = torchmetrics.SumMetric()

        def validation_step(self, batch: Any, _: int) -> None:
            self.ranks.update(float(hvd.rank()))
            self.collection.update(float(hvd.rank()))
            self.late.update(1.0)
            if hvd.rank() == 1:  # the other rank has no samples
                self.inputs.update(batch[0][:, 0])
            self.log("ranks", self.ranks)
            self.log("reduced", float(hvd.rank()), sync_dist=True)
            self.log("most", float(hvd.rank()), sync_dist=True, reduce_fx="max")

        def on_validation_epoch_end(self) -> None:
            self.seen = self.inputs.compute()
            self.counted = self.late.compute()

    module = Measured()
    trainer = fit(module, data(), data(), max_epochs=1)
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {
        "ranks": 0.5,
        "reduced": 0.5,
        "most": 1.0,
    }
    assert module.seen.tolist() == INPUTS[1::2, 0].tolist()
    assert module.counted == 8
    assert module.collection.compute() == {"most": 1.0}
    pairs = horo.lightning.metrics.gather_states(torch.full((hvd.rank() + 1, 2 - hvd.rank()), hvd.rank()))
    assert [part.tolist() for part in pairs] == [[[0, 0]], [[1], [1]]]


def case_a_metric_may_keep_its_samples_in_the_state(_: Path) -> None:
    class Keeping(Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs = torchmetrics.CatMetric()
            self.inputs.persistent(True)

    module = Keeping()
    trainer = fit(module, max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data())  # the second one has optimizers of its own over the same parameters
    torch.testing.assert_close(
        values(module.parameters()), values(alone(restarted=True).parameters()), rtol=1e-5, atol=1e-6
    )


def case_no_launcher_is_looked_for(_: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_NTASKS", "2")  # Lightning would refuse it
        assert pl.Trainer(**QUIET, strategy="horo").world_size == 2
        assert Fabric(accelerator="cpu", strategy="horovod").world_size == 2
        with pytest.raises(RuntimeError, match="--ntasks=2"):
            pl.Trainer(**QUIET, strategy="ddp")


def case_without_a_launcher_the_trainer_will_start_ranks(_: Path) -> None:
    hvd.barrier()
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("HORO_", "HOROVOD_"))]:
            patch.delenv(name)
        trainer = pl.Trainer(**QUIET, strategy="horo", devices=2)
        assert (trainer.world_size, trainer.global_rank, hvd.is_initialized()) == (2, 0, False)
        trainer.state.fn, trainer.strategy.launcher._already_fit = "fit", True
        with pytest.raises(UsageError, match="make another Trainer"):
            trainer.strategy.launcher.launch(fit, trainer=trainer)
        with pytest.raises(UsageError, match="num_nodes=2, and no launcher"):
            pl.Trainer(**QUIET, strategy="horo", num_nodes=2)
        with pytest.raises(TypeError, match="needs to be called with a function"):
            Fabric(accelerator="cpu", strategy="horo", devices=2).launch()
        alone = pl.Trainer(**QUIET, strategy="horo")
        assert (alone.world_size, alone.strategy.launcher) == (1, None)
        hvd.shutdown()
    hvd.init()


def case_each_rank_has_a_device_of_its_own(_: Path) -> None:
    def chosen(given: list[int], visible: int, ranks: int = 2) -> list[int]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "device_count", lambda: visible)
            found = devices_of_ranks([torch.device("cuda", index) for index in given], ranks)
        return [device.index for device in found]

    assert chosen([0, 1], 2) == [0, 1]
    assert chosen([2, 3], 4) == [2, 3]
    assert chosen([0, 1, 2, 3], 4) == [0, 1]  # "auto" where the launcher has started fewer ranks
    assert chosen([0], 1) == [0, 0]  # another GPU for each rank that each sees as its first, or one for both
    assert chosen([0], 4) == [0, 1]
    for given, visible in (([1], 4), ([0, 1, 2], 4), ([0, 1, 2, 3], 8)):
        with pytest.raises(UsageError, match='give devices="auto" or devices=2'):
            chosen(given, visible)


def case_a_module_without_an_optimizer_goes_through_its_batches(_: Path) -> None:
    class Still(Module):
        def configure_optimizers(self) -> None:
            return None

    module = Still()
    fit(module, max_epochs=1, accumulate_grad_batches=2)
    torch.testing.assert_close(values(module.parameters()), values(network().parameters()))


def case_two_optimizers_by_hand(_: Path) -> None:
    class ByHand(Module):
        def __init__(self) -> None:
            super().__init__()
            self.other, self.automatic_optimization = network(), False

        def training_step(self, batch: Any, number: int) -> None:
            for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
                with optimizer.toggle_model(sync_grad=number % 2 == 1):
                    self.manual_backward((net(batch[0]) - batch[1]).square().mean() / 2)
                if number % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9) for net in (self.net, self.other)]

    module = ByHand()
    fit(module, max_epochs=1)
    expected = values(alone(epochs=1, passes=2).parameters())
    for net in (module.net, module.other):
        torch.testing.assert_close(values(net.parameters()), expected, rtol=1e-5, atol=1e-6)


def case_one_checkpoint_and_a_resumed_run_is_one_that_went_on(
    folder: Path, strategy: Callable[[], Any] = lambda: "horo"
) -> None:
    whole = Validated()
    trained = fit(whole, data(), data(), max_epochs=3)
    saving = ModelCheckpoint(folder, monitor="loss", save_top_k=1)
    fit(Validated(), data(), data(), strategy=strategy(), enable_checkpointing=True, callbacks=[saving])
    assert hvd.allgather_object(saving.best_model_path) == [saving.best_model_path] * 2
    assert [file.name for file in folder.iterdir()] == [Path(saving.best_model_path).name]
    module = Validated()
    trainer = pl.Trainer(**QUIET, strategy=strategy(), max_epochs=3)
    trainer.fit(module, data(), data(), ckpt_path=saving.best_model_path)
    assert trainer.global_step == trained.global_step == 12
    rates = [run.optimizers[0].param_groups[0]["lr"] for run in (trainer, trained)]
    assert rates == [0.02 / 8] * 2
    assert (values(module.parameters()) == values(whole.parameters())).all()
    (found,) = trainer.validate(module, data(), verbose=False)
    assert found["loss"] == pytest.approx(float(trained.callback_metrics["loss"]))


def case_ranks_stop_early_together(_: Path) -> None:
    class Worse(Module):
        def validation_step(self, *_: Any) -> None:
            self.log("own", float(self.current_epoch * hvd.rank()))  # only on rank 1 does it get worse

    trainer = fit(Worse(), data(), data(), max_epochs=5, callbacks=[EarlyStopping("own", patience=1)])
    assert hvd.allgather_object(trainer.current_epoch) == [trainer.current_epoch] * 2
    assert trainer.current_epoch < 5


def case_learning_rates_are_scaled_if_asked(_: Path) -> None:
    trainer = fit(Module(), strategy=horo.lightning.HoroStrategy(scale_lr=True), max_epochs=1)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.02 * 2 / 2)
    assert trainer.lr_scheduler_configs[0].scheduler.base_lrs == [0.04]


def case_wrong_arguments_get_a_sentence(_: Path) -> None:
    def refused(act: Callable[[], object], said: str) -> None:
        with pytest.raises(UsageError, match=said):
            act()

    refused(lambda: pl.Trainer(**QUIET, strategy="horo", devices=3), "devices=3.*started 2 ranks on this host")
    refused(lambda: pl.Trainer(**QUIET, strategy="horo", num_nodes=2), "num_nodes=2, but .* on 1 hosts")
    refused(lambda: horo.lightning.HoroStrategy(buffers="mean"), "buffers='mean': expected one of average")
    refused(lambda: horo.lightning.HoroStrategy(find_unused_parameters=True), "find_unused_parameters=")
    strategy = pl.Trainer(**QUIET, strategy="horo", devices=2).strategy
    refused(lambda: strategy.reduce(torch.ones(1), reduce_op="median"), "reduce_op='median'")
    refused(lambda: strategy.reduce(torch.ones(1), group=3), "group=3.*process set")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(horo.lightning, "_PACKAGES", {})
        with pytest.raises(ResourceError, match="pip install lightning"):
            horo.lightning.register()
    with pytest.raises(UnsupportedError, match="no address"):
        _ = strategy.cluster_environment.main_address


def case_fabric_learns_as_one_process(folder: Path) -> None:
    fabric = Fabric(accelerator="cpu", strategy="horo")
    fabric.launch()
    net = network()
    with torch.no_grad():
        net[0].weight.add_(hvd.rank())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    net, optimizer = fabric.setup(net, optimizer)
    for number, (inputs, targets) in enumerate(fabric.setup_dataloaders(data())):
        with fabric.no_backward_sync(net, enabled=number % 2 == 0):
            fabric.backward((net(inputs) - targets).square().mean() / 2)
        if number % 2 == 1:
            fabric.clip_gradients(net, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    expected = values(alone(epochs=1, passes=2, clip=0.5).parameters())
    torch.testing.assert_close(values(net.parameters()), expected, rtol=1e-5, atol=1e-6)
    own = torch.tensor([float(hvd.rank())])
    assert fabric.all_gather(own).tolist() == [[0.0], [1.0]]
    assert fabric.all_reduce(own, reduce_op="sum") is own
    assert own == 1
    own = torch.ones(1, requires_grad=True)
    (fabric.all_gather(own, sync_grads=True).sum() * (1.0 + hvd.rank())).backward()
    assert own.grad == 1 + 2  # of the losses of both ranks
    assert fabric.broadcast({"from": hvd.rank()}, src=1) == {"from": 1}
    fabric.save(folder / "fabric.ckpt", {"net": net, "optimizer": optimizer, "step": 4})
    assert [file.name for file in folder.iterdir()] == ["fabric.ckpt"]
    assert fabric.load(folder / "fabric.ckpt", {"net": net, "optimizer": optimizer})["step"] == 4


def case_pytorch_lightning_has_the_strategies_too(_: Path) -> None:
    import pytorch_lightning  # noqa: PLC0415

    assert [module.__name__ for module in horo.lightning.register()] == [
        "horo.lightning.with_lightning",
        "horo.lightning.with_pytorch_lightning",
    ]

    class Other(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return (self.net(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)

    module = Other()
    pytorch_lightning.Trainer(**QUIET, strategy="horo", max_epochs=1).fit(module, data())
    expected = values(alone(epochs=1).parameters())
    torch.testing.assert_close(values(module.parameters()), expected, rtol=1e-5, atol=1e-6)


def lose_rank(lost: int) -> str:
    """The error on the other rank when this one is killed in a step."""

    class Dying(Module):
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            if number == 2 and hvd.rank() == lost:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(batch, number)

    with pytest.raises(GroupError) as caught:
        fit(Dying())
    return f"{type(caught.value).__name__}: {caught.value}"
