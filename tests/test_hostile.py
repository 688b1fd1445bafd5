"""Places and times that programs stumble at: full disks, read-only folders, odd names, a clock set back."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from accum_sweep.record import records, sweeps
from conftest import Cli

pytestmark = pytest.mark.slow
SIDE_BY_SIDE = ("hydra/launcher=processes", "hydra.launcher.workers=2")


def mount(folder: Path, *options: str) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", folder], capture_output=True)
    if done.returncode != 0:
        pytest.skip("file systems cannot be mounted here")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount(folder, "size=1m")
    yield folder
    deadline = time.monotonic() + 10  # worker processes end a moment after the one they worked for
    while subprocess.run(["umount", folder]).returncode:
        assert time.monotonic() < deadline, "something is left running there"
        time.sleep(0.1)


@pytest.mark.parametrize("launcher", [(), SIDE_BY_SIDE])
def test_a_full_disk_is_told_and_what_was_written_goes_on_later(cli: Cli, small: Path, launcher: Sequence[str]) -> None:
    words = ("-m", "seed=range(0,8)", "problem=digits_mlp", "epochs=1", "tracking=none", *launcher)
    filler = small / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small).free - 130_000))  # room for a few records
    full = cli(*words, cwd=small)
    assert full.returncode == 1, full.stderr
    assert "No space left on device" in full.stderr
    assert "Traceback" not in full.stderr
    assert "8 runs, " in full.stdout or " finished" in full.stdout
    kept = [record for record in records(small / "runs") if record.status == "finished"]
    assert 0 < len(kept) < 8
    filler.unlink()
    done = cli(*words, "sweep.resume=latest", cwd=small)
    assert done.returncode == 0, done.stderr
    assert f"{len(kept)} of 8 runs have their result" in done.stderr
    assert [record.status for record in records(small / "runs")] == ["finished"] * 8
    assert {record.run_id for record in kept} < {record.run_id for record in records(small / "runs")}


@pytest.mark.parametrize("words", [(), ("-m", "seed=0,1"), ("-m", "seed=0,1", *SIDE_BY_SIDE)])
@pytest.mark.parametrize("tracking", ["mlflow", "none"])
def test_a_read_only_folder_is_told_at_once(cli: Cli, small: Path, words: Sequence[str], tracking: str) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    done = cli(*words, f"tracking={tracking}", cwd=small)
    assert done.returncode in (1, 2)
    assert (
        "Read-only file system" in done.stderr
        or "readonly database" in done.stderr
        or "cannot be written" in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 2


@pytest.mark.parametrize("launcher", [(), SIDE_BY_SIDE])
def test_a_folder_may_have_any_name(cli: Cli, tmp_path: Path, launcher: Sequence[str]) -> None:
    folder = tmp_path / 'it\'s a "folder", {x: 1} $HOME [a=b] #%20 ü'
    folder.mkdir()
    words = ("-m", "lr=0.1,1e30", "steps=9", *launcher)
    first = cli(*words, cwd=folder)
    assert first.returncode == 1, first.stderr
    assert "2 runs, 1 finished" in first.stdout
    again = cli(*words, "sweep.resume=latest", cwd=folder)
    assert "2 of 2 runs have their result, 0 to go" in again.stderr
    assert cli("sync", cwd=folder).stdout == "0 runs sent, 0 completed, 0 sweeps closed, 2 were there\n"
    assert cli("summary", "latest", cwd=folder).returncode == 0


def test_a_clock_set_back_loses_nothing(tmp_path: Path) -> None:
    if (faketime := shutil.which("faketime")) is None:
        pytest.skip("faketime is not installed")

    def at(when: str, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [faketime, "-m", "-f", when, sys.executable, "-m", "accum_sweep", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=dict(os.environ))

    swept = ("-m", "lr=0.1,0.2", "seed=0,1")
    assert at("+2d", *swept).returncode == 0
    done = at("-2d", *swept)
    assert done.returncode == 0, done.stderr
    assert len(sweeps(tmp_path / "runs")) == 2
    last = at("-3d", *swept, "lr=0.1,0.2,0.3", "sweep.resume=latest", "sweep.extend=true")
    assert last.returncode == 0, last.stderr
    assert sorted(sweep.size for _, sweep in sweeps(tmp_path / "runs")) == [4, 6]
    assert at("-3d", "sync").stdout == "0 runs sent, 0 completed, 0 sweeps closed, 10 were there\n"
