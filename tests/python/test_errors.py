"""The errors that scripts catch: where they are found, and that they cross process borders."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest

import horo.torch as hvd
from horo import errors

STATUSES = {"TimeoutError": "TIMEOUT", "PeerLostError": "PEER_LOST", "UnsupportedError": "UNSUPPORTED"}
CLASSES = [name for name in errors.__all__ if isinstance(getattr(errors, name), type)]


def test_every_public_name_of_the_module_is_an_error() -> None:
    assert errors.__all__ == CLASSES
    assert all(issubclass(getattr(errors, name), errors.HoroError) for name in CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_horo_torch_has_the_same_class(name: str) -> None:
    assert getattr(hvd, name) is getattr(errors, name)


def test_a_star_import_leaves_pythons_own_names_alone() -> None:
    code = "kept = TimeoutError\nfrom horo.torch import *\nassert TimeoutError is kept\nassert PeerLostError"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_an_error_can_be_pickled(name: str, protocol: int) -> None:
    error = getattr(errors, name)("allreduce 'w': rank 1 (h2) is gone")
    for other in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(other) is type(error)
        assert (str(other), other.args) == (str(error), error.args)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("TimeoutError", TimeoutError), ("PeerLostError", ConnectionError), ("UnsupportedError", NotImplementedError)],
)
def test_an_error_is_what_python_calls_it_too(name: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^rank 1 is gone$") as caught:
        raise errors.error_from_status(f"HORO_ERR_{STATUSES[name]}", "rank 1 is gone")
    assert type(caught.value) is getattr(errors, name)
    assert caught.value.args == ("rank 1 is gone",)
    assert getattr(caught.value, "errno", None) is None


def test_a_traceback_names_the_module_that_a_script_imports() -> None:
    code = "import horo.torch as hvd\nhvd.rank()"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1].startswith("horo.errors.NotInitializedError: ")


def test_the_errors_can_be_had_without_torch() -> None:
    code = "import horo.errors, sys; assert not {'torch', 'horo._native'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
