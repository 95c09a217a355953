"""As ``lightning_cases``: what Lightning logs, and who logs it."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning_cases import Validated, data, fit
from lightning_utilities.core.rank_zero import rank_zero_only

import horo.lightning
import horo.torch as hvd
from horo.errors import ResourceError, UsageError


def case_one_rank_logs_and_shows_progress(folder: Path) -> None:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        fit(Validated(), data(), data(), logger=CSVLogger(folder, version=0), enable_progress_bar=True)
    hvd.barrier()  # rank 0 has written the log
    assert rank_zero_only.rank == hvd.rank()
    rank_zero_only.rank = 7
    hvd.shutdown()
    hvd.init()
    assert rank_zero_only.rank == hvd.rank()
    assert ("Epoch 1" in shown.getvalue()) == (hvd.rank() == 0), shown.getvalue()
    assert [file.name for file in folder.glob("*/version_0/metrics.csv")] == ["metrics.csv"]
    (log,) = folder.glob("*/version_0/metrics.csv")
    assert len(log.read_text().splitlines()) == 3  # the heading and the two validations


class Run(dict[str, Any]):
    """Keeps what a logger tells Neptune."""

    def __missing__(self, name: str) -> Any:
        if name == "sys/id":
            raise NeptuneError("offline")
        self[name] = Field()
        return self[name]

    def wait(self, *, disk_only: bool = False) -> None:
        self["waited"] = disk_only


class Field(list[Any]):
    def append(self, value: Any, step: int | None = None) -> None:
        super().append((step, value))

    def upload(self, path: str) -> None:
        super().append(Path(path).exists())


class NeptuneError(Exception):
    pass


def case_neptune_gets_what_rank_0_logs(folder: Path) -> None:
    class Logged(Validated):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 3})

        def on_train_start(self) -> None:
            self.logger.experiment["by hand"] = 1

    runs: list[Run] = []

    def init_run(**options: Any) -> Run:
        runs.append(Run(options))
        return runs[-1]

    doubles = {name: ModuleType(name) for name in ("neptune", "neptune.utils", "neptune.exceptions")}
    vars(doubles["neptune"]).update(init_run=init_run, __spec__=ModuleSpec("neptune", None))
    vars(doubles["neptune.utils"]).update(stringify_unsupported=lambda value: value)
    vars(doubles["neptune.exceptions"]).update(NeptuneException=NeptuneError)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in doubles.items():
            patch.setitem(sys.modules, name, module)
        logger = horo.lightning.NeptuneLogger(mode="offline", name="a run")
        keeping = ModelCheckpoint(folder, filename="{epoch}", monitor="loss", save_last=True)
        every = ModelCheckpoint(folder, filename="every-{epoch}", save_top_k=-1)  # no monitor: none is the best
        latest = ModelCheckpoint(folder, filename="latest-{step}", every_n_train_steps=4)
        fit(Logged(), data(), data(), logger=logger, enable_checkpointing=True, callbacks=[keeping, every, latest])
        assert logger.version == "offline"
        refused = horo.lightning.NeptuneLogger(run=Run())
        with pytest.raises(UsageError, match="give it the arguments"):
            copy.copy(refused)
        with pytest.raises(UsageError, match="leave out what init_run takes: mode"):
            horo.lightning.NeptuneLogger(run=Run(), mode="offline")
    with pytest.raises(ResourceError, match="pip install neptune"):
        horo.lightning.NeptuneLogger()
    assert hvd.allgather_object(len(runs)) == [1, 0]
    if hvd.rank() == 0:
        (run,) = runs
        assert (run["mode"], run["by hand"], run["training/status"], run["waited"]) == ("offline", 1, "success", True)
        assert run["training/hyperparams"] == {"width": 3}
        assert [step for step, _ in run["training/loss"]] == [3, 7]
        assert run["training/model/best_model_path"] in {each.best_model_path for each in (keeping, every, latest)}
        uploaded = {name: field for name, field in run.items() if "checkpoints/" in name}
        checkpoints = "training/model/checkpoints"
        assert uploaded == {
            f"{checkpoints}/epoch=1": [True],
            f"{checkpoints}/last": [True, True],
            f"{checkpoints}/every-epoch=0": [True],
            f"{checkpoints}/every-epoch=1": [True],
            f"{checkpoints}/latest-step=8": [True],
        }
