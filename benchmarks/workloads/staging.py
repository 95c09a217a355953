"""A sum of tensors that pass through pinned host memory, or for the process alone, their copies there and back."""

from __future__ import annotations

from typing import Any

import torch
from contestant import Unsupported, Work
from devices import Place, place_of
from libraries import Library


def prepare(library: Library, parameters: dict[str, Any]) -> Work:
    """``parameters``: counts (elements of each tensor, float32); device, see devices."""
    place = place_of(parameters, library.rank)
    tensors = [place.put(torch.zeros(count)) for count in parameters["counts"]]
    if library.kind == "alone":
        return Work(copies(tensors, place))
    if library.kind != "horo":
        raise Unsupported(f"the library '{library.kind}' is not asked for this")
    return of_horo(library, tensors, place)


def copies(tensors: list[torch.Tensor], place: Place) -> Any:
    """What the link between host and device can do: all there, then all back, as a stream does it."""
    hosts = [torch.empty(tensor.shape, pin_memory=place.is_gpu) for tensor in tensors]

    def call() -> None:
        for tensor, host in zip(tensors, hosts, strict=True):
            host.copy_(tensor, non_blocking=True)
        for tensor, host in zip(tensors, hosts, strict=True):
            tensor.copy_(host, non_blocking=True)
        place.finish()

    return call


def of_horo(library: Library, tensors: list[torch.Tensor], place: Place) -> Work:
    hvd, expected = library.module, library.size * (library.size + 1) // 2

    def call() -> None:
        hvd.grouped_allreduce_(tensors, op=hvd.Sum, name="staging")
        place.finish()

    def check() -> str:
        for tensor in tensors:
            tensor.fill_(library.rank + 1)
        call()
        wrong = sum(not bool((tensor.cpu() == expected).all()) for tensor in tensors)
        for tensor in tensors:
            tensor.zero_()  # the timed calls sum zeros, which stay zeros
        return f"{wrong} of {len(tensors)} tensors" if wrong else ""

    return Work(call, check)
