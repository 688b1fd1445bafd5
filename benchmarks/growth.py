"""What a run of a sweep costs beyond its training, in time and memory, as sweeps grow; and that none is missing.

    python -m benchmarks.growth 10 100 1000 [--launcher processes --workers 8] [--store URI] [--write]

The runs are the textbook's. The time is that of the command, less that of the same command with one run, so that
imports and the store's first use are left out, each the median of five where runs are few; the memory is the highest of
the sweep's own process. With `--store` an MLflow database at that address is used; `none` tracks nothing.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from accum_sweep.environment import versions
from accum_sweep.errors import without_secrets

FEW, REPEATS = 20, 5
REPORT = Path(__file__).with_suffix(".md")
HEAD = """# The cost of a run as sweeps grow

{machine}; textbook runs. `python -m benchmarks.growth` with what each table's title says.
"""


@dataclass(frozen=True)
class Cost:
    """Of one sweep."""

    runs: int
    seconds: float
    peak_bytes: int  # of the sweep's own process
    finished: int  # on disk
    tracked: int | None  # finished in the store
    said: str  # what it said to standard error beyond its progress


def measure_well(runs: int, words: list[str], store: str) -> Cost:
    """Run a sweep; one of few runs several times, as the start of a command varies more than they take."""
    costs = [measure(runs, words, store) for _ in range(REPEATS if runs <= FEW else 1)]
    return sorted(costs, key=lambda cost: cost.seconds)[len(costs) // 2]


def measure(runs: int, words: list[str], store: str) -> Cost:
    """Run a sweep in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="accum-sweep-growth-") as place:
        folder = Path(place)
        command = [sys.executable, "-m", "accum_sweep", "-m", f"seed=range(0,{runs})", *words]
        environment, had = dict(os.environ), 0
        if store == "none":
            command.append("tracking=none")
        elif store != "sqlite":
            environment["MLFLOW_TRACKING_URI"] = store
            had = _tracked(store)
        began = time.monotonic()
        with (folder / "said").open("w") as said:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=said)
            peak = 0
            while process.poll() is None:
                peak = max(peak, _peak_bytes(process.pid))
                time.sleep(0.05)
        seconds = time.monotonic() - began
        others = [
            line
            for line in (folder / "said").read_text().splitlines()
            if not re.match(r"\d+/\d+|records: |in MLflow", line)
        ]
        finished = sum('"status": "finished"' in path.read_text() for path in folder.glob("runs/*/*/record.json"))
        address = f"sqlite:///{folder}/mlflow.db" if store == "sqlite" else store
        tracked = None if store == "none" else _tracked(address) - had
        return Cost(runs, seconds, peak, finished, tracked, " ".join(others))


def _peak_bytes(pid: int) -> int:
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def _tracked(address: str) -> int:
    from mlflow import MlflowClient

    client, token, found = MlflowClient(address), None, Counter[str]()
    experiment = client.get_experiment_by_name("accum-sweep")
    if experiment is None:
        return 0
    while True:
        page = client.search_runs([experiment.experiment_id], max_results=1000, page_token=token)
        found.update(
            run.data.tags["accum_sweep.run_id"]
            for run in page
            if run.info.status == "FINISHED" and "accum_sweep.run_id" in run.data.tags
        )
        if not (token := page.token):
            return len(found)


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", type=int, nargs="+")
    parser.add_argument("--launcher", choices=("basic", "processes"), default="basic")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--store", default="sqlite")
    parser.add_argument("--write", action="store_true", help=f"add a table to {REPORT.name}")
    given = parser.parse_args()
    words = [f"hydra/launcher={given.launcher}"]
    if given.launcher == "processes":
        words.append(f"hydra.launcher.workers={given.workers}")
    one = measure_well(1, words, given.store)
    side = f", {given.workers} workers" if given.launcher == "processes" else ""
    store = re.sub(r"://.*", "", without_secrets(given.store))
    lines = [
        f"\n## launcher {given.launcher}{side}, store {store}\n",
        "| runs | ms a run | of the first row | peak MB | finished | in MLflow | said beside |",
        "|---|---|---|---|---|---|---|",
    ]
    first = None
    for runs in given.runs:
        cost = measure_well(runs, words, given.store)
        each = (cost.seconds - one.seconds) / (runs - 1) * 1000
        first = first or each
        tracked = "" if cost.tracked is None else cost.tracked
        cells = [str(runs), f"{each:.0f}", f"{each / first:.2f}", f"{cost.peak_bytes / 1e6:.0f}", str(cost.finished)]
        lines.append(f"| {' | '.join([*cells, str(tracked), cost.said[:60]])} |")
        print(lines[-1], flush=True)
    if given.write:
        found = versions()
        machine = f"{os.cpu_count()} cores; Python {found['python']}, torch {found['torch']}, MLflow {found['mlflow']}"
        text = REPORT.read_text() if REPORT.exists() else HEAD.format(machine=machine)
        REPORT.write_text(text + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
