"""Where a run computes: from `device` in the config to a torch device, its name, and a clock that reads it rightly."""

import itertools
import platform
import time
from pathlib import Path

import torch

from accum_sweep.errors import UserError


def resolve(name: str, precision: str) -> torch.device:
    """Return the device called `name`, with its number if it is a CUDA device, so that one device has one name.

    auto is the current CUDA device, else MPS if it knows this precision, else the CPU. Raises UserError where this
    machine has no such device.
    """
    if name == "auto":
        mps = torch.backends.mps.is_available() and precision != "fp64"
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            there = f"{count} CUDA device(s)" if torch.version.cuda else "a PyTorch built without CUDA"
            raise UserError(f"device={name} is not there: this machine has {there}; use device=auto or device=cpu")
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device=mps is not there: this machine has no Metal device; use device=auto or device=cpu")
    return device


def hardware_name(device: torch.device) -> str:
    """Return the model name of the GPU or processor behind `device`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if device.type == "cpu" and cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class Clock:
    """Marks moments in a device's own order of work, and tells afterwards how many seconds lay between them.

    On CUDA a mark is an event in the stream, so that marking never waits for the device; `seconds` does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        """Mark this moment."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            if self._device.type == "mps":
                torch.mps.synchronize()
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds between each mark and the next."""
        if self._events:
            torch.cuda.synchronize(self._device)
            return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(self._events)]
        return [after - before for before, after in itertools.pairwise(self._times)]
