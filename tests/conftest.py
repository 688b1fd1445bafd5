"""What the tests share: the real command line in a folder of its own, and a watch on what a test leaves behind."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from warm import Warm

# Settings of whoever runs the tests that would change what the product does.
FOREIGN = ("MLFLOW_TRACKING_URI", "MLFLOW_BACKEND_STORE_URI", "HYDRA_FULL_ERROR")
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is there: tests run side by side, and so do the programs they start

# What torch, MLflow and we set once, at import or first use, and never take back.
SET_BY_IMPORTS = ("PYTEST_", "KINETO_", "KMP_", "TORCHINDUCTOR_", "MLFLOW_HTTP_REQUEST_MAX_RETRIES")

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True, scope="session")
def _own_environment() -> None:
    for name in FOREIGN:
        os.environ.pop(name, None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: our programs would ignore it too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # tests reach no network
    os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that spin for each other crawl on a busy machine


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before = dict(os.environ)
    threads = set(threading.enumerate())
    yield
    changed = {key for key in before.keys() | os.environ.keys() if before.get(key) != os.environ.get(key)}
    left = {name for name in changed if not name.startswith(SET_BY_IMPORTS)}
    assert not left, "environment leaked"
    new = [thread for thread in set(threading.enumerate()) - threads if not thread.daemon]
    if new:
        gc.collect()  # a pool that an exception's traceback holds ends with it
    for thread in new:
        thread.join(timeout=5)
    alive = [thread for thread in new if thread.is_alive()]
    assert not alive, "threads leaked"


@pytest.fixture(scope="session")
def warm(_own_environment: None) -> Iterator[Warm]:
    process = Warm()
    yield process
    process.end()


@pytest.fixture
def cli(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Cli:
    """`python -m accum_sweep WORDS` in the test's own folder, forked from a process that has the libraries loaded."""
    said = tmp_path_factory.getbasetemp() / "said"

    def run(*words: str, cwd: Path = tmp_path, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **more}
        if warm.takes(environment):
            done = warm.run(words, cwd, environment, said, timeout=300)
        else:
            command = [sys.executable, "-m", "accum_sweep", *words]
            done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, env=environment)
        assert "Warning" not in done.stderr, done.stderr
        return done

    return run


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own folder as the current one, for `accum_sweep.run`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
