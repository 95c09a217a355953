"""A logger for Neptune: Lightning's own has become an error."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

from horo.errors import ResourceError, UsageError
from horo.lightning.place import Base

__all__ = ["NeptuneLogs"]


class NeptuneLogs(Base):
    """``Trainer(logger=NeptuneLogger(mode="offline"))``: rank 0 logs to one run of the package ``neptune``.

    Metrics and hyperparameters have the names that Lightning's NeptuneLogger gave them.

    Args:
        run: A run that the script has made on rank 0; None: the logger makes one when it first logs.
        prefix: The namespace of all that is logged.
        log_model_checkpoints: Whether to upload the checkpoints that ModelCheckpoint keeps.
        options: Of ``neptune.init_run``, such as ``project``, ``api_token``, ``name``, ``tags`` and ``mode``.

    Raises:
        ResourceError: The package is not installed.
        UsageError: There are a run and options for another.
    """

    def __init__(
        self, *, run: Any = None, prefix: str = "training", log_model_checkpoints: bool = True, **options: Any
    ) -> None:
        super().__init__()
        if run is not None and options:
            raise UsageError(f"NeptuneLogger: with run=, leave out what init_run takes: {', '.join(options)}")
        if find_spec("neptune") is None:
            raise ResourceError("NeptuneLogger needs the package neptune: pip install neptune")
        self._run, self._own = run, run is None
        self._prefix, self._log_model_checkpoints, self._options = prefix, log_model_checkpoints, options
        self._uploaded: dict[str, dict[str, int]] = {}  # by the ModelCheckpoint, of which there may be several

    def make_run(self) -> Any:
        """The run of Neptune; Lightning asks for it as ``experiment``, on rank 0 only."""
        if self._run is None:
            import neptune  # noqa: PLC0415  (takes seconds, and other ranks do not need it)

            self._run = neptune.init_run(**self._options)
        return self._run

    @property
    def name(self) -> str:
        """The name of the run."""
        return str(self._options.get("name") or "neptune")

    @property
    def version(self) -> str:
        """Neptune's number of the run; ``"offline"`` where no server has given one."""
        if getattr(rank_zero_only, "rank", 0) != 0:
            return "offline"  # a checkpoint is in the folder that rank 0 names
        from neptune.exceptions import NeptuneException  # noqa: PLC0415

        try:
            return str(self.make_run()["sys/id"].fetch())
        except NeptuneException:
            return "offline"

    @property
    def save_dir(self) -> str:
        """The folder for checkpoints: that in which Neptune keeps what it has not sent."""
        return str(Path.cwd() / ".neptune")

    @rank_zero_only
    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Logs the arguments of the module and of the data."""
        from neptune.utils import stringify_unsupported  # noqa: PLC0415

        given = vars(params) if isinstance(params, Namespace) else dict(params or {})
        self.make_run()[f"{self._prefix}/hyperparams"] = stringify_unsupported(given)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Adds a value to each series."""
        for name, value in metrics.items():
            self.make_run()[f"{self._prefix}/{name}"].append(value, step=step)

    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Uploads the files of checkpoints that are new, and removes those that this ModelCheckpoint removes."""
        if not self._log_model_checkpoints:
            return
        run, folder = self.make_run(), f"{self._prefix}/model"
        latest = {checkpoint_callback.last_model_path, checkpoint_callback.best_model_path}
        paths = {path for path in {*checkpoint_callback.best_k_models, *latest} if Path(path).is_file()}
        kept = {path: Path(path).stat().st_mtime_ns for path in paths}
        before = self._uploaded.get(checkpoint_callback.state_key, {})
        for path, written_ns in kept.items():
            if before.get(path) != written_ns:
                run[f"{folder}/checkpoints/{Path(path).stem}"].upload(path)
        if checkpoint_callback.save_top_k == -1:
            kept = {**before, **kept}
        for path in before.keys() - kept.keys():
            del run[f"{folder}/checkpoints/{Path(path).stem}"]
        self._uploaded[checkpoint_callback.state_key] = kept
        if checkpoint_callback.best_model_path:
            run[f"{folder}/best_model_path"] = checkpoint_callback.best_model_path
        if checkpoint_callback.best_model_score is not None:
            run[f"{folder}/best_model_score"] = float(checkpoint_callback.best_model_score)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Logs how training has ended, to the disk at once. The run stays open for what the script logs afterwards."""
        if self._run is not None and status:
            self._run[f"{self._prefix}/status"] = status
            self._run.wait(disk_only=True)  # without, it waits for a server, for ever where that does not answer

    def __getstate__(self) -> dict[str, Any]:
        if not self._own:
            raise UsageError(
                "NeptuneLogger(run=...) cannot go to the ranks that the Trainer starts: give it the arguments of "
                "neptune.init_run, or start the script with hororun"
            )
        return {**self.__dict__, "_run": None}
