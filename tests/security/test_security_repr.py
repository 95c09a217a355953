"""A secret is in no ``repr``: those end in logs, in tracebacks with variables and in reports of errors."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterator

import pytest

import horo.bootstrap
import horo.runner
from horo.bootstrap.auth.handshake import Acceptor, Claim, HandshakeResult, Purpose
from horo.bootstrap.launchers.slurm_store import _StoreInfo
from horo.bootstrap.net.addresses import Endpoint
from horo.bootstrap.net.dial import _Attempt
from horo.runner.agent.protocol import Kind, Message
from horo.runner.job.external_launcher import _Plan

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
