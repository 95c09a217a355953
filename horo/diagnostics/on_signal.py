"""The stacks of a process that hangs, also if its interpreter does."""

from __future__ import annotations

import faulthandler
import signal

__all__ = ["STACKS_SIGNAL", "show_stack_on_signal"]

STACKS_SIGNAL = signal.SIGRTMAX - 1
"""The signal by which hororun asks a worker for its stack before it kills it."""


def show_stack_on_signal() -> None:
    """Has the signal write the stack of the main thread to stderr, unless the program uses that signal itself."""
    if signal.getsignal(STACKS_SIGNAL) == signal.SIG_DFL:
        faulthandler.register(STACKS_SIGNAL, file=2, all_threads=False)
