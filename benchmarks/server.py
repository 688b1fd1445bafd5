"""An MLflow server that keeps files too, which can be ended at once and started again."""

import contextlib
import os
import signal
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

QUICK = {"MLFLOW_WORKERS": "1", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """The server, started where a with statement begins and ended where that ends. Its data stay in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.address = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [Path(sysconfig.get_path("scripts")) / "mlflow", "server", "--port", str(self._port)]
        command += ["--backend-store-uri", f"sqlite:///{self._folder}/store.db"]
        command += ["--artifacts-destination", f"{self._folder}/files"]
        self._process = subprocess.Popen(
            command,
            cwd=self._folder,
            env={**os.environ, **QUICK},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError, urllib.error.URLError):
                if urllib.request.urlopen(f"{self.address}/health", timeout=5).status == 200:
                    return
            if time.monotonic() > deadline:
                raise TimeoutError("the server does not answer")
            time.sleep(0.2)

    def end(self) -> None:
        """Kill it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
