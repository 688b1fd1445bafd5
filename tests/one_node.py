"""A Slurm of one node on this machine: munged, slurmctld and slurmd in a folder of their own."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.server import free_port

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={slurmctld}
SlurmdPort={slurmd}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=main Nodes={host} Default=YES PriorityTier=1
PartitionName=urgent Nodes={host} PriorityTier=2
"""


def missing() -> str | None:
    """Say why there is none here; None where it can be started."""
    lacking = [name for name in NEEDED if shutil.which(name) is None]
    if lacking:
        return f"Slurm is not installed ({', '.join(lacking)})"
    return None if os.geteuid() == 0 else "Slurm's node runs as root only"


@contextmanager
def one_node(folder: Path) -> Iterator[dict[str, str]]:
    """Start it, with two cores and the partitions `main` and `urgent`, which takes the node from `main`.

    Yields the environment that its commands need.
    """
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    conf = folder / "slurm.conf"
    ports = {"slurmctld": free_port(), "slurmd": free_port()}
    conf.write_text(CONF.format(host=socket.gethostname().partition(".")[0], folder=folder, **ports))
    there = {"SLURM_CONF": str(conf)}
    files = ("key", "socket", "pid", "log", "seed")
    munged = [
        *("munged", "--foreground", "--force"),
        *(f"--{name}-file={folder}/munge.{name}".replace("socket-file", "socket") for name in files),
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in (munged, ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-c"]):
            with (folder / f"{command[0]}.out").open("w") as out:
                process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **there})
            started.append(process)
            _wait(folder, (folder / "munge.socket").exists)
        _wait(folder, lambda: _idle(there))
        yield there
    finally:
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _idle(there: dict[str, str]) -> bool:
    done = subprocess.run(
        ["sinfo", "-h", "-p", "main", "-o", "%T"], capture_output=True, text=True, env={**os.environ, **there}
    )
    return done.stdout.strip() == "idle"


def _wait(folder: Path, ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not ready():
        if time.monotonic() > until:
            said = "\n".join(path.read_text(errors="replace") for path in folder.glob("*.out"))
            raise RuntimeError(f"Slurm does not start:\n{said}")
        time.sleep(0.05)
