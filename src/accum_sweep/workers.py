"""Processes that do one task after another. One that dies costs the task it was at, and is replaced.

Standard library only. A Ctrl-C reaches the processes once, through this one, and each ends what it is at in order; a
second one ends them at once. They end with this process, however that ends.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from signal import SIGINT, SIGKILL
from typing import Any

from accum_sweep import child

PATIENCE_SECONDS = 30.0  # for a process that was interrupted

Begin = Callable[[int], Callable[[Any], Any]]
"""(number of the worker, from 0) -> what does a task. It, the tasks and their results are pickled."""


@dataclass(frozen=True)
class Died:
    """In the place of a result: the process ended, with this exit code; below 0, by a signal."""

    code: int


def work(tasks: Sequence[Any], begin: Begin, count: int, fresh: bool = False, preload: Sequence[str] = ()) -> list[Any]:
    """Let `count` processes do the tasks; return what came of each, in their order.

    All of them start at once, from one that has imported the modules `preload`. With `fresh` every task has a process
    of its own.
    """
    context = get_context("forkserver")  # not fork: threads and CUDA of this process would be copied half
    context.set_forkserver_preload(list(preload))
    waiting = deque(range(len(tasks)))
    results: list[Any] = [None] * len(tasks)
    crew = [_Worker(context, begin, number) for number in range(min(count, len(tasks)))]
    try:
        for worker in crew:
            worker.give(waiting.popleft(), tasks)
        while busy := [worker for worker in crew if worker.task is not None]:
            ready = wait([end for worker in busy for end in (worker.connection, worker.process.sentinel)])
            for worker in busy:
                if worker.connection in ready or worker.process.sentinel in ready:
                    assert worker.task is not None, "it is busy"
                    results[worker.task] = worker.result()
                    worker.task = None
                    if waiting:
                        if fresh:
                            worker.end()
                        worker.give(waiting.popleft(), tasks)
    except KeyboardInterrupt:
        for worker in crew:
            worker.interrupt()
        for worker in crew:
            worker.process.join(PATIENCE_SECONDS)
        raise
    finally:
        for worker in crew:
            worker.end()
    return results


class _Worker:
    """One place at work, and the process that holds it."""

    def __init__(self, context: Any, begin: Begin, number: int) -> None:
        self._context, self._begin, self._number = context, begin, number
        self.task: int | None = None  # what it is at
        self._start()

    def _start(self) -> None:
        self.connection, its_end = self._context.Pipe()
        self.process = self._context.Process(target=_serve, args=(self._begin, self._number, its_end))
        self.process.start()
        its_end.close()  # or its death would not be seen
        self._ended = False

    def give(self, task: int, tasks: Sequence[Any]) -> None:
        """Hand out a task; a process that has ended is replaced before."""
        if self._ended or not self.process.is_alive():
            self.end()
            self._start()
        self.task = task
        with suppress(BrokenPipeError):  # it died just now; the result will say so
            self.connection.send(tasks[task])

    def result(self) -> Any:
        """Return what came of the task."""
        with suppress(EOFError, ConnectionError):
            if self.connection.poll():
                return self.connection.recv()
        self.process.join()
        return Died(self.process.exitcode)

    def interrupt(self) -> None:
        """Pass a Ctrl-C on."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, SIGINT)

    def end(self) -> None:
        """End the process, whatever it is at."""
        if not self._ended:
            self._ended = True
            self.process.kill()
            self.process.join()
            self.process.close()
            self.connection.close()


def _serve(begin: Begin, number: int, connection: Connection) -> None:
    """Do what comes through the pipe, until it is closed or a Ctrl-C is passed on."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.setpgid(0, 0)  # a Ctrl-C at the terminal is the parent's to pass on
    child.stop_when_told()
    with suppress(EOFError, KeyboardInterrupt):
        do = begin(number)
        while True:
            connection.send(do(connection.recv()))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "this process was started by another"
    wait([parent.sentinel])
    os.kill(os.getpid(), SIGKILL)
