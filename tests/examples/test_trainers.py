"""The pieces of ``docs/how-to/trainers.md``, each on two ranks of an environment with its library."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from document_blocks import ROOT, python_blocks
from jobs import Hororun

HERE = Path(__file__).parent
PYTHON = ROOT / "build" / "trainers" / "bin" / "python"
PAGE = ROOT / "docs" / "how-to" / "trainers.md"
NAMES = [block.mark.removeprefix("script=") for block in python_blocks(PAGE) if block.mark]
IMPORTS_S = 280.0
"""A deadline for imports that take ten seconds, on a machine that does other things, too."""
# Ray uses these in processes that it starts.
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "200"}

pytestmark = pytest.mark.skipif(
    not (PYTHON.parents[1] / "installed").exists(), reason="build/trainers is not there (`make test-trainers` makes it)"
)


@pytest.mark.parametrize("name", NAMES)
def test_the_piece_trains_as_one_process_does(hororun: Hororun, tmp_path: Path, name: str) -> None:
    program = [str(PYTHON), str(HERE / "trainer_rank.py"), name]
    modules = [str(HERE), os.environ.get("PYTHONPATH", "")]
    offline = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "MLFLOW_ALLOW_FILE_STORE": "true"}
    environment = {"PYTHONPATH": os.pathsep.join(modules), **offline}
    if name == "ray":
        with tempfile.TemporaryDirectory(dir="/tmp") as short:  # the names of Ray's sockets are long
            job = hororun.launch(program, environment={**environment, **RAY, "RAY_TMPDIR": short}, cwd=tmp_path)
            done = job.finish(IMPORTS_S)
    else:
        words = ["-np", "2", "--no-prefix", *(["--no-torch-env"] if name.endswith("hvd") else []), *program]
        done = hororun.start(*words, environment=environment, cwd=tmp_path).finish(IMPORTS_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.splitlines().count("ok") == (1 if name == "ray" else 2), done.stdout
    written = {
        "transformers": "training_args.bin",
        "accelerate-hvd": "model.safetensors",
        "skorch-hvd": "params.pt",
    }
    if name in written:  # by rank 0
        assert [*(tmp_path / "out").rglob(written[name])], [*tmp_path.rglob("*")]
