"""Runs that end in odd ways, for tests of what becomes of them and of others: a problem that does as it is told."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ODD = """
import os
import signal
import time
from pathlib import Path
import torch
from accum_sweep.problems import Problem

def make(dtype, does):
    with open(f"pid.{os.getpid()}", "a") as file:
        file.write(f"{does} {torch.get_num_threads()}\\n")
    if does == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if does == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "exit":
        os._exit(3)
    if does == "raise":
        raise ValueError("a secret: postgresql://me:hush@db/x")
    if does == "unlucky_once":
        try:
            Path("again").touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGSEGV)
    if does == "memory":
        raise torch.OutOfMemoryError("out of memory, for a test")

    def loss(model, batch):
        while does == "wait" or (does == "wait_to_go" and not Path("go").exists()):
            Path(f"waiting.{os.getpid()}").touch()
            time.sleep(0.01)
        return model(batch[0]).square().sum(), len(batch[0])

    return Problem(torch.nn.Linear(2, 1).to(dtype), (torch.rand(8, 2, dtype=dtype),), loss)
"""


def odd(does: str) -> tuple[str, ...]:
    words = ("problem=custom", "problem.factory=odd:make", "problem.samples=8", "micro_batch_size=2")
    return *words, "problem.arguments=" + ",".join(f"{{does:{what}}}" for what in does.split())


def until(ready: Callable[[], object], otherwise: str) -> None:
    """Wait, for a minute at most."""
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end, otherwise
        time.sleep(0.1)


@contextmanager
def started(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Start the command line there, and go on once a job of it waits."""
    command = [sys.executable, "-m", "accum_sweep", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            until(lambda: list(folder.glob("waiting.*")) or process.poll() is not None, "no job starts")
            yield process
        finally:
            process.kill()
