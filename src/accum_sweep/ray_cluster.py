"""`hydra/launcher=ray`: the jobs of a multirun as tasks of Ray, on this machine or on a cluster.

Where a node does not see the sweep's folder, what its runs leave comes back with their results, and MLflow is told of
them from here. One whose process dies costs its run: Ray does not try it again, `sweep.retries` does.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from accum_sweep.errors import ConfigError, Fault, UserError
from accum_sweep.hydra_job import HydraJobs, folder_of, lost
from accum_sweep.record import RECORD_FILE, SweepRecord, read, read_sweep, write

PATIENCE_SECONDS = 30.0  # for runs that were interrupted
QUIET = {"logging_level": "ERROR", "log_to_driver": False, "include_dashboard": False}

Files = dict[str, bytes]
"""What a run has left in its folder, by name."""


@dataclass(frozen=True)
class Ray:
    """How Ray is started or found, and what each run asks of it."""

    start: dict[str, Any]  # of ray.init
    options: dict[str, Any]  # of ray.remote
    task: "_Task"


def prepare(keys: Mapping[str, Any], config: DictConfig, context: HydraContext, task: TaskFunction) -> Ray:
    """Check the keys under `hydra.launcher`; raise ConfigError for what there is not or what is not understood."""
    faults = []
    if find_spec("ray") is None:
        faults.append(Fault("hydra/launcher", "ray", "needs Ray", 'pip install "accum-sweep[ray]"'))
    for key, least in (("num_cpus", 1), ("num_gpus", 0)):
        if type(keys[key]) is not int or keys[key] < least:
            rule = f"must be a whole number, {least} or more"
            faults.append(Fault(f"hydra.launcher.{key}", keys[key], rule, f"for example {key}=1"))
    address = str(keys["address"] or os.environ.get("RAY_ADDRESS") or "local")  # not one that happens to run here
    if why := _unreachable(address):
        faults.append(Fault("hydra.launcher.address", address, f"is not there ({why})", "see ray status"))
    if faults:
        raise ConfigError(faults)
    given: dict[str, Any] = {
        key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for key, value in keys.items()
    }
    return Ray(
        start=QUIET | {"address": address} | given["init"],
        options={"num_cpus": given["num_cpus"], "num_gpus": given["num_gpus"], "max_retries": 0} | given["remote"],
        task=_Task(HydraJobs.of(config, context, task), Path.cwd(), list(sys.path), given["num_cpus"]),
    )


def _unreachable(address: str) -> str | None:
    """Say why nobody answers at a host and port; Ray itself would try for minutes."""
    found = re.fullmatch(r"(?:ray://)?(.+):(\d+)", address)
    if found is None:
        return None
    try:
        socket.create_connection((found[1], int(found[2])), timeout=10).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return None


def launch(job_overrides: Sequence[Sequence[str]], first: int, cluster: Ray) -> list[JobReturn]:
    """Run the jobs, numbered from `first`, and return what became of each, in their order."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # tells nobody, unless the user wants to
    import ray

    told_to_stop = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**{"ignore_reinit_error": True} | cluster.start)
        do, task = ray.remote(**cluster.options)(_do), ray.put(cluster.task)
    except (ConnectionError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise UserError(f"hydra/launcher=ray: Ray does not start ({why}); see hydra.launcher") from error
    finally:
        signal.signal(signal.SIGTERM, told_to_stop)  # Ray's own would exit
    folder = Path(cluster.task.jobs.config.hydra.sweep.dir)
    sweep = read_sweep(folder)
    assert sweep is not None, "it is written before its first job"
    numbers = range(first, first + len(job_overrides))
    handles = {
        do.remote(task, number, list(overrides), sweep): number
        for number, overrides in zip(numbers, job_overrides, strict=True)
    }
    returned: dict[int, JobReturn] = {}
    try:
        while waiting := [handle for handle, number in handles.items() if number not in returned]:
            for handle in ray.wait(waiting, timeout=1.0)[0]:
                try:
                    result, files = ray.get(handle)
                    if files is not None:
                        _bring_home(files, folder / str(handles[handle]), sweep.tracking)
                        result = lost("ran where the store was not told of it")
                except ray.exceptions.RayError as error:
                    result = lost(f"died in Ray: {str(error).strip().partition(chr(10))[0]}")
                returned[handles[handle]] = result
    except KeyboardInterrupt:
        _interrupt([handle for handle, number in handles.items() if number not in returned])
        raise
    return [returned[number] for number in numbers]


def _interrupt(waiting: Sequence[Any]) -> None:
    """Let what runs end in order, and take the others from the queue; a second Ctrl-C ends the waiting."""
    import ray

    for handle in waiting:
        ray.cancel(handle, force=False)
    ray.wait(list(waiting), num_returns=len(waiting), timeout=PATIENCE_SECONDS)


def _bring_home(files: Files, folder: Path, tracking: dict[str, Any]) -> None:
    """Put what a run has left elsewhere into its folder here, its record last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: name == RECORD_FILE):
        (folder / f"{name}.part").write_bytes(files[name])
        (folder / f"{name}.part").replace(folder / name)
    record = read(folder)
    assert record is not None, "it came with the others"
    write(replace(record, config=record.config | {"tracking": tracking}), folder)


# In the tasks


def _do(task: "_Task", number: int, overrides: list[str], sweep: SweepRecord) -> tuple[JobReturn, Files | None]:
    return task.do(number, overrides, sweep)


@dataclass(frozen=True)
class _Task:
    jobs: HydraJobs
    where: Path  # the command was started
    path: list[str]  # of its modules
    threads: int

    def do(self, number: int, overrides: list[str], sweep: SweepRecord) -> tuple[JobReturn, Files | None]:
        """Return what became of a job, and what it has left where the command does not see it."""
        sys.path += [place for place in self.path if place not in sys.path]
        import torch

        torch.set_num_threads(self.threads)
        with contextlib.suppress(OSError):  # there is no such folder on this node
            os.chdir(self.where)
        self.jobs.begin()
        composed = self.jobs.compose(number, overrides)
        here = read_sweep(Path(composed.hydra.sweep.dir))
        if here is not None and here.sweep_id == sweep.sweep_id:
            return self.jobs.run(composed), None
        with tempfile.TemporaryDirectory() as place:
            write(sweep, Path(place))
            with open_dict(composed):
                composed.hydra.sweep.dir = place
                composed.tracking.backend = "none"  # the store may not be seen from here either
            returned = self.jobs.run(composed)
            return returned, {path.name: path.read_bytes() for path in folder_of(composed).iterdir() if path.is_file()}
