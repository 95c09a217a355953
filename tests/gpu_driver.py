"""The calls of a program to the double of the CUDA driver."""

import ctypes
import threading
import time
from pathlib import Path

_NOT_READY = 600
_DEADLINE_S = 60.0


class Driver:
    """The double in this process."""

    def __init__(self, path: Path | str) -> None:
        self.lib = ctypes.CDLL(str(path))
        self.lib.double_alloc.restype = ctypes.c_uint64
        self.lib.double_address.restype = ctypes.c_void_p
        self.lib.cuInit(0)
        self._gates: list[ctypes.c_int] = []
        """The double looks at a gate until it is open, whether its caller has kept it or not."""

    def alloc(self, size: int) -> int:
        """An address on the device."""
        return int(self.lib.double_alloc(ctypes.c_size_t(max(size, 1))))

    def make_stream(self) -> int:
        out = ctypes.c_void_p()
        assert self.lib.cuStreamCreateWithPriority(ctypes.byref(out), 0, 0) == 0
        return int(out.value or 0)

    def add_floats(self, stream: int, address: int, size: int, value: float) -> None:
        """A kernel that adds to so many bytes of float32 values."""
        where = ctypes.c_void_p(stream), ctypes.c_uint64(address)
        self.lib.double_add(*where, ctypes.c_size_t(size), ctypes.c_float(value))

    def hold_stream(self, stream: int) -> ctypes.c_int:
        """What comes behind it on the stream waits until ``open`` is called with the result."""
        self._gates.append(gate := ctypes.c_int(0))
        self.lib.double_hold(ctypes.c_void_p(stream), ctypes.byref(gate))
        return gate

    def open(self, *gates: ctypes.c_int) -> None:
        for gate in gates:
            self.lib.double_open(ctypes.byref(gate))

    def synchronize(self, stream: int) -> None:
        event = ctypes.c_void_p()
        self.lib.cuCtxPushCurrent_v2(ctypes.c_void_p(1))
        assert self.lib.cuEventCreate(ctypes.byref(event), 0) == 0
        assert self.lib.cuEventRecord(event, ctypes.c_void_p(stream)) == 0
        end = time.monotonic() + _DEADLINE_S
        while self.lib.cuEventQuery(event) == _NOT_READY:
            assert time.monotonic() < end
            threading.Event().wait(0.0005)
        self.lib.cuEventDestroy_v2(event)
        self.lib.cuCtxPopCurrent_v2(ctypes.byref(event))
