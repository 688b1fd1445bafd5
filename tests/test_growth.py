"""A long sweep costs a run what a short one does: its process does not grow from run to run."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells how much memory a process uses"),
]
RUNS, WARM = 30, 10
PER_RUN = 100_000  # bytes; the configuration of one alone is 0.7 MB, and has to be collected
UNCOLLECTED = """
import gc
gc.collect = lambda *_: 0
gc.disable()
"""


@pytest.mark.parametrize("collected", [True, False])
def test_memory_does_not_grow_with_the_number_of_runs(tmp_path: Path, collected: bool) -> None:
    """The control: without the collection after each run, which Python alone does too seldom, it does grow."""
    if not collected:
        (tmp_path / "sitecustomize.py").write_text(UNCOLLECTED)
    words = ("-m", f"seed=range(0,{RUNS})", "hydra.sweep.dir=runs/all")
    process = subprocess.Popen(
        [sys.executable, "-m", "accum_sweep", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    used = {}
    for number in (WARM, RUNS - 1):
        while not (tmp_path / f"runs/all/{number}/record.json").exists():
            assert process.poll() is None
            time.sleep(0.002)
        used[number] = resident_bytes(process.pid)
    assert process.wait(60) == 0
    grown = (used[RUNS - 1] - used[WARM]) / (RUNS - 1 - WARM)
    assert (grown < PER_RUN) == collected, f"{grown:.0f} bytes a run"


def resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
