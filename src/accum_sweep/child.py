"""How a process that works for another one behaves: it ends with it, and stops once when told to. No torch."""

import ctypes
import os
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with(parent: int) -> None:
    """Let the kernel end this process when `parent`, which started it, ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was faster
            sys.exit(1)


def stop_when_told() -> None:
    """Let the first SIGINT or SIGTERM interrupt what this process does; let nothing interrupt what follows."""
    signal.signal(signal.SIGINT, _stop_once)
    signal.signal(signal.SIGTERM, _stop_once)


def _stop_once(*_: object) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
