"""A process that has the libraries loaded, of which the command line is forked: most of a start is importing them.

As a program it reads a request a line, and writes the fork's number, then how it ended. It loads no accum-sweep.
"""

import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import threading
from pathlib import Path

LOADED = ("torch", "torch._dynamo", "pandas", "mlflow", "mlflow.store.tracking.sqlalchemy_store", "hydra", "pydantic")
# Read by Python and its libraries as they start, and so of no effect here.
READ_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "MLFLOW_DISABLE")


class Warm:
    """The process, from outside. It ends with its standard input."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._environment = dict(os.environ)

    def takes(self, environment: dict[str, str]) -> bool:
        """Tell whether a program in this environment is the same when forked."""
        keys = environment.keys() | self._environment.keys()
        differing = {key for key in keys if environment.get(key) != self._environment.get(key)}
        return not any(key.startswith(READ_AT_START) for key in differing)

    def run(
        self, words: tuple[str, ...], cwd: Path, environment: dict[str, str], said: Path, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """`python -m accum_sweep WORDS`; what it says goes through files whose names begin with `said`."""
        out, err = (said.with_name(f"{said.name}.{number}") for number in (1, 2))
        request = {"words": words, "cwd": str(cwd), "environment": environment, "files": [str(out), str(err)]}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        pid = int(self._server.stdout.readline())
        late = threading.Timer(timeout, os.kill, (pid, 9))
        late.start()
        code = int(self._server.stdout.readline())
        late.cancel()
        late.join()
        done = subprocess.CompletedProcess(list(words), code, out.read_text(), err.read_text())
        out.unlink()
        err.unlink()
        return done

    def end(self) -> None:
        """Let it go."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()


def serve() -> bool:
    """Fork for each request; return True in the fork, False when there are no more."""
    for name in LOADED:
        importlib.import_module(name)
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if (pid := os.fork()) == 0:
            answers.close()
            become(**request)
            return True
        print(pid, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
    return False


def become(words: list[str], cwd: str, environment: dict[str, str], files: list[str]) -> None:
    """Be as a new process with these words, folder, environment, and files for what it says."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv[1:] = words
    sys.path[0] = cwd
    null = Path(os.devnull).open()  # noqa: SIM115 until the program's end
    os.dup2(null.fileno(), 0)
    sys.stdin = null
    for number, file in enumerate(files, start=1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)


if __name__ == "__main__" and serve():
    runpy.run_module("accum_sweep", run_name="__main__", alter_sys=True)
