"""Where a run computes: from `device` in the config to a torch device, its name, and a clock that reads it rightly."""

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accum_sweep import launch
from accum_sweep import limit as limit_of_process
from accum_sweep.errors import UserError

HEADROOM = 0.1  # of memory that is left alone: fragments, kernels' workspaces, what others take meanwhile


def resolve(name: str, precision: str) -> torch.device:
    """Return the device called `name`, with its number if it is a CUDA device, so that one device has one name.

    auto is the current CUDA device, else MPS if it knows this precision, else the CPU. Raises UserError where this
    machine has no such device.
    """
    if name == "auto":
        mps = torch.backends.mps.is_available() and precision not in ("fp64", "tf32")
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        index: int | None = device.index
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index is None and launch.world_size() > 1:
            index = launch.local_rank()
            if launch.local_world_size() > count:  # told on every rank, or some would wait for the others
                raise UserError(
                    f"device={name}: {launch.local_world_size()} processes here, but {count} CUDA device(s)"
                )
        if (index or 0) >= count:
            there = f"{count} CUDA device(s)" if torch.version.cuda else "a PyTorch built without CUDA"
            raise UserError(f"device={name} is not there: this machine has {there}; use device=auto or device=cpu")
        return torch.device("cuda", torch.cuda.current_device() if index is None else index)
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


def free_bytes(device: torch.device) -> int | None:
    """Return how much memory is free on a device, as far as it can be told; None where it cannot."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    available = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    free = int(available.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")  # of a container
    if limit.exists() and (words := limit.read_text().strip()) != "max":
        free = min(free, int(words) - int(used.read_text()))
    left = limit_of_process.left_bytes()
    return free if left is None else min(free, left)


class Clock:
    """Tells afterwards how many seconds each lap took, pauses left out, in a device's own order of work.

    On CUDA a mark is an event in the stream, so that marking never waits for the device; `seconds` does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._starts: list[Any] = []
        self._stops: list[Any] = []
        self._laps: list[int] = []  # of each interval
        self._lap = 0

    def resume(self) -> None:
        """Let the clock run."""
        self._starts.append(self._mark())

    def pause(self) -> None:
        """Stop the clock."""
        self._stops.append(self._mark())
        self._laps.append(self._lap)

    def lap(self) -> None:
        """Stop the clock at the end of a lap."""
        self.pause()
        self._lap += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens inside."""
        self.pause()
        yield
        self.resume()

    def seconds(self) -> list[float]:
        """Return the seconds of each finished lap."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        laps = [0.0] * (self._lap + 1)
        for lap, start, stop in zip(self._laps, self._starts, self._stops, strict=False):
            laps[lap] += start.elapsed_time(stop) / 1000 if self._device.type == "cuda" else stop - start
        return laps[: self._lap]

    def _mark(self) -> Any:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            return event
        if self._device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()
