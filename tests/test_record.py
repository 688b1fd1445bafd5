"""Records on disk: whole or not there, readable again, and clear when damaged."""

import json
import math
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from accum_sweep.errors import UserError
from accum_sweep.record import Record, SweepRecord, read, read_sweep, records, sweeps, write, write_atomically


def a_record(**more: object) -> Record:
    words: dict[str, object] = {
        "run_id": "s/0",
        "run_key": "k",
        "name": "n",
        "status": "finished",
        "reason": None,
        "started_at": "2026-01-01T00:00:00+00:00",
        "ended_at": "2026-01-01T00:00:01+00:00",
        "overrides": ["lr=0.1"],
        "config": {"lr": 0.1, "problem": {"name": "linear"}},
        "environment": {"git_dirty": None},
    }
    return Record(**words | more)  # type: ignore[arg-type]


def a_sweep(sweep_id: str, created_at: str) -> SweepRecord:
    return SweepRecord(sweep_id, created_at, ["lr=1,2"], [["lr=1"], ["lr=2"]], ["lr=1", "lr=2"], "lr=1,2")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    record = a_record(metrics={"last_loss": 0.1, "steps_done": 3}, series={"train/loss": [1.0, 0.1]})
    write(record, tmp_path)
    assert read(tmp_path) == record
    sweep = replace(a_sweep("s", "2026-01-01T00:00:00+00:00"), skipped={1: "larger"})
    write(sweep, tmp_path)
    assert read_sweep(tmp_path) == sweep
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record.json", "sweep.json"]


def test_numbers_that_are_not_finite_stand_as_null(tmp_path: Path) -> None:
    write(a_record(metrics={"last_loss": math.inf}, series={"train/loss": [1.0, math.nan]}), tmp_path)
    json.loads((tmp_path / "record.json").read_text(), parse_constant=pytest.fail)
    found = read(tmp_path)
    assert found is not None
    assert found.metrics["last_loss"] is None
    assert found.series["train/loss"] == [1.0, None]


def _write_for_ever(path: Path) -> None:
    for turn in range(10**9):
        write_atomically(path, json.dumps([turn] * 20000))


def test_a_kill_in_the_middle_of_writing_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for _ in range(5):
        process = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(path,))
        process.start()
        time.sleep(0.15)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        content = json.loads(path.read_text())
        assert len(content) == 20000
        assert len(set(content)) == 1


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "a", "new \ud800")
    assert (tmp_path / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_no_record_is_none_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    for text in ("{", "[]", "{}"):
        (tmp_path / "record.json").write_text(text)
        with pytest.raises(UserError, match=r"record\.json"):
            read(tmp_path)


def test_a_newer_record_is_told_and_an_unknown_field_is_not_in_the_way(tmp_path: Path) -> None:
    write(a_record(), tmp_path)
    content = json.loads((tmp_path / "record.json").read_text())
    (tmp_path / "record.json").write_text(json.dumps(content | {"colour": "blue"}))
    assert read(tmp_path) == a_record()
    (tmp_path / "record.json").write_text(json.dumps(content | {"version": 99}))
    with pytest.raises(UserError, match="newer accum-sweep"):
        read(tmp_path)


def test_sweeps_and_records_come_in_order(tmp_path: Path) -> None:
    for sweep_id, created in (("b", "2026-01-01T00:00:00+00:00"), ("a", "2026-01-02T00:00:00+00:00")):
        (tmp_path / sweep_id).mkdir()
        write(a_sweep(sweep_id, created), tmp_path / sweep_id)
        for number in (10, 2):
            folder = tmp_path / sweep_id / str(number)
            folder.mkdir()
            write(a_record(run_id=f"{sweep_id}/{number}", sweep_id=sweep_id, job_num=number), folder)
    assert [sweep.sweep_id for _, sweep in sweeps(tmp_path)] == ["b", "a"]
    assert [record.run_id for record in records(tmp_path)] == ["a/2", "a/10", "b/2", "b/10"]
    assert [record.run_id for record in records(tmp_path / "b")] == ["b/2", "b/10"]
    assert list(records(tmp_path / "nothing")) == []
