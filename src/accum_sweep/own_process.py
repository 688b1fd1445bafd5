"""A run in a process of its own, whose memory is limited: what ends the process does not end this one.

The child trains and writes the record, as `execute` does without a limit. It ends with this process, however that ends.
Where it dies without a record, the way it died says what becomes of the run.
"""

import contextlib
import importlib
import json
import logging
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from accum_sweep import launch
from accum_sweep.child import end_with, stop_when_told
from accum_sweep.config import Config
from accum_sweep.errors import UserError
from accum_sweep.limit import EXACT_MALLOC, killed_for_memory
from accum_sweep.record import Identity, Record, Status, read, refuse_second
from accum_sweep.units import show_bytes
from accum_sweep.untrained import leave

log = logging.getLogger(__name__)

# What a process says, to standard error, when it ends for want of memory: C++, Python, kernels, libgomp, Rust.
LAST_WORDS = (
    "bad_alloc",
    "MemoryError",
    "allocate memory",
    "out of memory",
    "not enough memory",
    "memory allocation of",
    "Thread creation failed",
)
REMEMBERED = 4000  # characters of standard error
PATIENCE_SECONDS = 30.0  # for a child that was interrupted to write its record

# The child imports from where this process does, which is not always where Python looks by itself. Until it has, a
# Ctrl-C ends it without a word.
CHILD = """
import json, signal, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
sys.path[:] = json.loads(sys.argv[1])
from accum_sweep.own_process import child
child()
"""


def execute_apart(config: Config, folder: Path, identity: Identity) -> Record:
    """Do what `execute` does in a process that may take `config.memory_limit` bytes; return the record.

    Random state, environment and threads of this process are untouched. Raises UserError where the folder holds a run
    already, or the problem cannot be handed to another process.
    """
    assert config.memory_limit is not None, "without a limit a run needs no process of its own"
    refuse_second(folder)
    started = datetime.now(UTC)
    killed_before = killed_for_memory()
    code, said, interrupted = _supervise(_packed(config, folder, identity))
    record = read(folder)
    if record is None:
        status, reason = INTERRUPTED
        if not interrupted:
            starved = killed_for_memory() > killed_before
            status, reason = fate(code, said, config.memory_limit, starved)
        record = leave(config, folder, identity, status, reason, started, None if interrupted else said)
    if interrupted and record.status != "interrupted":  # the run was faster; who pressed Ctrl-C wants to stop even so
        raise KeyboardInterrupt
    return record


INTERRUPTED: tuple[Status, str] = "interrupted", "stopped by the user"


def fate(code: int, said: str, limit: int, starved: bool) -> tuple[Status, str]:
    """Return status and reason of a run whose process ended without a record, by exit code and last words.

    Codes below 0 are signals. SIGKILL is what the system sends where memory runs out, but others may send it, too:
    `starved` tells whether the system has killed a process for that meanwhile.
    """
    short = (code == -signal.SIGKILL and starved) or any(words in said for words in LAST_WORDS)
    how = f"ended with exit code {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"
    last = said.strip().splitlines()[-1:]
    reason = f"the run's process {how} without a record{''.join(f': {line.strip()}' for line in last)}"
    return ("oom", f"{reason} (memory_limit={show_bytes(limit)})") if short else ("failed", reason)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have none
        return f"signal {number}"


def _packed(config: Config, folder: Path, identity: Identity) -> bytes:
    torch = sys.modules.get("torch")
    threads = None if torch is None else torch.get_num_threads()  # with others, sums would be rounded otherwise
    level = logging.getLogger("accum_sweep").getEffectiveLevel()
    try:
        return pickle.dumps((config, folder, identity, threads, level))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = config.problem.name
        raise UserError(f"memory_limit: problem {name} cannot be sent to a process of its own ({error})") from error


def _supervise(task: bytes) -> tuple[int, str, bool]:
    """Run the child to its end; return its exit code, the end of what it said, and whether it was told to stop."""
    messages, sending = os.pipe()
    command = [sys.executable, "-c", CHILD, json.dumps(sys.path), str(os.getpid()), str(sending)]
    said, interrupted = [""], False
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[sending],
        env=EXACT_MALLOC | os.environ,
        process_group=0,  # a Ctrl-C reaches this process alone, which hands it on once
    )
    try:
        os.close(sending)
        try:
            _feed(process, task)
            _listen(process, messages, said)
        except KeyboardInterrupt:
            interrupted = True
            process.send_signal(signal.SIGINT)
            _listen(process, messages, said, PATIENCE_SECONDS)
    finally:
        process.kill()  # nothing to one that has ended
        code = process.wait()
        os.close(messages)
        if process.stderr is not None:
            process.stderr.close()
    return code, said[0], interrupted


def _feed(process: "subprocess.Popen[bytes]", task: bytes) -> None:
    assert process.stdin is not None, "it is a pipe"
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # how it died, is seen when it is waited for
        pipe.write(task)


def _listen(process: "subprocess.Popen[bytes]", messages: int, said: list[str], patience: float | None = None) -> None:
    """Hand on what the child logs and says to standard error until it ends or patience does; `said` keeps the end."""
    assert process.stderr is not None, "it is a pipe"
    deadline = None if patience is None else time.monotonic() + patience
    unfinished = b""
    with selectors.DefaultSelector() as selector:
        selector.register(messages, selectors.EVENT_READ)
        selector.register(process.stderr.fileno(), selectors.EVENT_READ)
        while selector.get_map() and (deadline is None or time.monotonic() < deadline):
            ready = selector.select(timeout=0.5)
            if not ready and process.poll() is not None:  # processes of its own may still hold the pipes open
                return
            for key, _ in ready:
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fd)
                elif key.fd == messages:
                    *lines, unfinished = (unfinished + chunk).split(b"\n")
                    for line in lines:
                        _log(line)
                else:
                    text = chunk.decode(errors="replace")
                    sys.stderr.write(text)
                    said[0] = (said[0] + text)[-REMEMBERED:]
    if deadline is None:
        process.wait()


def _log(line: bytes) -> None:
    with contextlib.suppress(ValueError):  # half a line: an interrupt came between
        words = json.loads(line)
        logging.getLogger(words["name"]).handle(logging.makeLogRecord(words))


# The child's side


class _Messenger(logging.Handler):
    """Sends what is logged to the parent, a line of JSON each."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; where there is no memory to write it, or nobody to read, it is lost."""
        with contextlib.suppress(MemoryError, OSError):
            words = {"name": record.name, "levelno": record.levelno, "levelname": record.levelname}
            if record.exc_info:
                words["exc_text"] = logging.Formatter().formatException(record.exc_info)
            line = json.dumps(words | {"msg": record.getMessage()}) + "\n"
            os.write(self._descriptor, line.encode())


def child() -> NoReturn:
    """Do what the parent sends on standard input, and end."""
    parent, descriptor = map(int, sys.argv[2:4])
    end_with(parent)
    stop_when_told()
    try:
        config, folder, identity, threads, level = pickle.load(sys.stdin.buffer)
        logging.getLogger().addHandler(_Messenger(descriptor))
        logging.getLogger("accum_sweep").setLevel(level)
        _warm_up(config, threads)
        from accum_sweep.execute import execute

        execute(config, folder, identity)
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as error:
        sys.exit(str(error))
    launch.end(0)


def _warm_up(config: Config, threads: int | None) -> None:
    """Load and start what is loaded and started at first use, so that the limit counts the run and not libraries."""
    import torch

    from accum_sweep.memory import measure_peak
    from accum_sweep.optimizers import probe

    if threads is not None:
        torch.set_num_threads(threads)
    for library in ("scipy.linalg", *config.problem.libraries):  # OpenBLAS, loaded without room for its buffers, hangs
        with contextlib.suppress(Exception):  # the run will tell
            importlib.import_module(library)
    probe(config.optimizer, config.lr)
    rows = 1024 * torch.get_num_threads()  # enough for every thread of the pool to have its share
    layer = torch.nn.Linear(64, 64)
    measure_peak(lambda: layer(torch.rand(rows, 64)).sum().backward(), torch.device("cpu"))
