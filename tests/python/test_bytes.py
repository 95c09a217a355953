"""The bytes of tensors without numpy."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch

from horo.torch.engine.tensor_bytes import bytes_of, tensor_of


@pytest.mark.parametrize("data", [b"", b"\0", b"abc" * 1000])
def test_bytes_go_into_a_tensor_and_come_back(data: bytes) -> None:
    assert tensor_of(data).dtype == torch.uint8
    assert bytes(bytes_of(tensor_of(data))) == data


def test_every_dtype_has_bytes() -> None:
    assert bytes(bytes_of(torch.tensor([1, 2], dtype=torch.int16))) == b"\1\0\2\0"
    assert bytes(bytes_of(torch.tensor(True))) == b"\1"
    assert len(bytes_of(torch.ones(3, 5, dtype=torch.bfloat16))) == 30
    assert bytes(bytes_of(torch.arange(6, dtype=torch.uint8)[2:4])) == b"\2\3"


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
