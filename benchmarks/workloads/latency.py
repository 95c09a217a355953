"""One small allreduce in place: from the call to its result, or only until an asynchronous call returns."""

from __future__ import annotations

from typing import Any

import torch
from contestant import Unsupported, Work
from libraries import Library


class Asynchronous:
    """Submits one operation per call under names in turn; what was submitted is waited for after the turn."""

    def __init__(self, module: Any, tensors: list[torch.Tensor]) -> None:
        self._module, self._tensors = module, tensors
        self._handles: list[int] = []

    def call(self) -> None:
        if len(self._handles) == len(self._tensors):
            self.finish()
        index = len(self._handles)
        module = self._module
        self._handles.append(module.allreduce_async_(self._tensors[index], op=module.Sum, name=f"latency{index}"))

    def finish(self) -> None:
        for handle in self._handles:
            self._module.synchronize(handle)
        self._handles.clear()


def prepare(library: Library, parameters: dict[str, Any]) -> Work:
    """``parameters``: form ("complete", "submit" or "poll"), count (elements)."""
    form, count, module = parameters["form"], parameters["count"], library.module
    tensor = torch.zeros(count)
    if library.kind not in ("horo", "horovod", "gloo"):
        raise Unsupported(f"the library '{library.kind}' is not asked for this")

    def complete() -> None:
        if library.kind == "gloo":
            module.all_reduce(tensor)
        else:
            module.allreduce_(tensor, op=module.Sum, name=f"latency.{count}")

    def check() -> str:
        tensor.fill_(library.rank + 1)
        complete()
        want = library.size * (library.size + 1) // 2
        wrong = int((tensor != want).sum())
        tensor.zero_()  # the timed calls reduce zeros, which stay zeros however often they are summed
        return f"{wrong} of {count} elements" if wrong else ""

    if form == "complete":
        return Work(complete, check)
    if library.kind == "gloo":
        raise Unsupported("torch.distributed has no handles")
    if form == "poll":
        # A tensor of its own: until the operation is done, it is the library's.
        handle = module.allreduce_async_(torch.zeros(count), op=module.Sum, name=f"latency.poll.{count}")
        return Work(lambda: module.poll(handle), check)
    submitter = Asynchronous(module, [torch.zeros(count) for _ in range(parameters["in_flight"])])
    return Work(submitter.call, check, before_turn=submitter.finish)
