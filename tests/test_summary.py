"""The comparison, against means and ratios worked out by hand; and that a wrong pairing would show."""

import csv
import dataclasses
import math
import os
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from accum_sweep import exports, table
from accum_sweep.check import check
from accum_sweep.compose import compose
from accum_sweep.record import Record, Status
from accum_sweep.summary import compare, varying
from accum_sweep.tidy import to_frame

DIGITS = "problem=digits_mlp"


def record(
    *overrides: str,
    loss: float = 1.0,
    peak: int = 100,
    rate: float = 10.0,
    status: Status = "finished",
    reason: str | None = None,
    **more: Any,
) -> Record:
    """A record as a run would leave it, with numbers of our choice."""
    metrics = {"first_loss": 2.0, "last_loss": loss, "peak_allocated_bytes": peak, "samples_per_second": rate}
    config = check(compose(overrides)).model_dump(mode="json")
    name = " ".join(overrides)
    times = {"started_at": "2026-01-01T00:00:00+00:00", "ended_at": "2026-01-01T00:00:01+00:00"}
    shown = metrics if status == "finished" else {}
    return Record(
        name, name, name, status, reason, **times, overrides=[], config=config, environment={}, metrics=shown, **more
    )


def sweep() -> list[Record]:
    """Two seeds at a fixed effective batch; the seeds differ more than the settings do."""
    size = "effective_batch_size=64"
    return [
        record(DIGITS, size, "accum_steps=1", "seed=0", loss=1.0, peak=1000, rate=100.0),
        record(DIGITS, size, "accum_steps=1", "seed=1", loss=3.0, peak=1000, rate=300.0),
        record(DIGITS, size, "accum_steps=4", "seed=0", loss=1.5, peak=400, rate=50.0),
        record(DIGITS, size, "accum_steps=4", "seed=1", loss=3.1, peak=400, rate=90.0),
    ]


def test_seeds_are_folded_to_mean_and_spread() -> None:
    (comparison,) = compare(to_frame(sweep()))
    row = comparison.rows.set_index("accum_steps").loc[4]
    assert (row["runs"], row["finished"]) == (2, 2)
    assert row["last_loss"] == pytest.approx((1.5 + 3.1) / 2)
    assert row["last_loss_std"] == pytest.approx(statistics.stdev([1.5, 3.1]))


def test_every_setting_is_set_against_accum_steps_1_seed_by_seed() -> None:
    (comparison,) = compare(to_frame(sweep()))
    row = comparison.rows.set_index("accum_steps").loc[4]
    assert row["last_loss_vs_baseline"] == pytest.approx(((1.5 - 1.0) + (3.1 - 3.0)) / 2)
    assert row["peak_allocated_bytes_vs_baseline"] == pytest.approx(0.4)
    assert row["samples_per_second_vs_baseline"] == pytest.approx(math.sqrt(50 / 100 * 90 / 300))
    # Means first, then the ratio, would be another number: the pairing is in it.
    assert row["samples_per_second_vs_baseline"] != pytest.approx((50 + 90) / (100 + 300))


def test_the_order_of_the_records_does_not_matter() -> None:
    forward, backward = (compare(to_frame(runs))[0].rows for runs in (sweep(), sweep()[::-1]))
    pd.testing.assert_frame_equal(forward, backward, check_like=True)


def test_a_seed_without_baseline_is_in_the_mean_and_not_in_the_comparison() -> None:
    runs = [*sweep(), record(DIGITS, "effective_batch_size=64", "accum_steps=4", "seed=2", loss=100.0)]
    (comparison,) = compare(to_frame(runs))
    row = comparison.rows.set_index("accum_steps").loc[4]
    assert row["last_loss"] == pytest.approx((1.5 + 3.1 + 100) / 3)
    assert row["last_loss_vs_baseline"] == pytest.approx(0.3)


def test_the_baseline_shares_every_other_setting() -> None:
    runs = [
        record(DIGITS, f"lr={lr}", f"accum_steps={k}", "micro_batch_size=16", loss=loss)
        for lr, k, loss in ((0.1, 1, 1.0), (0.1, 4, 1.2), (0.01, 1, 2.0), (0.01, 4, 2.7))
    ]
    (comparison,) = compare(to_frame(runs))
    rows = comparison.rows.set_index(["accum_steps", "lr"])
    assert rows.loc[(4, 0.1), "last_loss_vs_baseline"] == pytest.approx(0.2)
    assert rows.loc[(4, 0.01), "last_loss_vs_baseline"] == pytest.approx(0.7)


def test_failed_runs_keep_their_row_and_stay_out_of_the_means() -> None:
    failed = record(
        DIGITS, "effective_batch_size=64", "accum_steps=4", "seed=2", loss=99.0, status="diverged", reason="too | much"
    )
    lost = record(DIGITS, "effective_batch_size=64", "accum_steps=8", "seed=0", status="oom", reason="no room")
    (comparison,) = compare(to_frame([*sweep(), failed, lost]))
    rows = comparison.rows.set_index("accum_steps")
    assert (rows.loc[4, "runs"], rows.loc[4, "finished"]) == (3, 2)
    assert rows.loc[4, "last_loss"] == pytest.approx(2.3)
    assert rows.loc[8, "finished"] == 0
    assert math.isnan(rows.loc[8, "last_loss"])
    text = table.text([comparison])
    assert "2 of 3" in text
    assert "oom: no room" in text
    assert "diverged: too \\| much" in exports.markdown([comparison])


def test_two_kinds_of_sweep_never_share_a_table() -> None:
    other = [record(DIGITS, "micro_batch_size=16", f"accum_steps={k}", sweep_id="other") for k in (1, 4)]
    runs = [*sweep(), *other]
    kinds = [comparison.kind for comparison in compare(to_frame(runs))]
    assert kinds == ["effective_batch_size", "micro_batch_size"]
    assert "fixed effective batch" in table.text(compare(to_frame(runs)))


@pytest.mark.parametrize(
    ("grid", "kind"),
    [
        ([(1, 16), (4, 16)], "micro_batch_size"),
        ([(1, 64), (4, 16)], "effective_batch_size"),
        ([(k, m) for k in (1, 2, 4) for m in (8, 16)], "micro_batch_size"),
        ([(k, e // k) for k in (1, 2, 4) for e in (32, 64)], "effective_batch_size"),
        ([(2, 8), (2, 16)], ""),
    ],
)
def test_the_kind_is_the_size_that_stays(grid: list[tuple[int, int]], kind: str) -> None:
    runs = [record(DIGITS, f"accum_steps={k}", f"micro_batch_size={m}") for k, m in grid]
    assert [comparison.kind for comparison in compare(to_frame(runs))] == [kind]


def test_two_devices_are_two_settings_also_where_auto_chose_them() -> None:
    def on(device: str, accum_steps: int, rate: float) -> Record:
        run = record(DIGITS, "effective_batch_size=64", f"accum_steps={accum_steps}", rate=rate)
        return dataclasses.replace(run, environment={"device": device})

    runs = [on("cpu", 1, 100.0), on("cpu", 4, 50.0), on("cuda:0", 1, 1000.0), on("cuda:0", 4, 900.0)]
    (comparison,) = compare(to_frame(runs))
    rows = comparison.rows.set_index(["accum_steps", "device"])["samples_per_second_vs_baseline"]
    assert rows[4, "cpu"] == pytest.approx(0.5)
    assert rows[4, "cuda:0"] == pytest.approx(0.9)


def test_a_run_repeated_is_no_second_seed() -> None:
    (once,), (twice,) = compare(to_frame(sweep())), compare(to_frame([*sweep(), sweep()[0]]))
    pd.testing.assert_frame_equal(
        once.rows.drop(columns=["runs", "finished"]), twice.rows.drop(columns=["runs", "finished"])
    )


def test_final_weights_are_set_against_the_baseline_by_their_distance() -> None:
    runs = [
        record("accum_steps=1", "problem.initial_weight=[0,0]", result={"final_weight": [1.0, 2.0]}),
        record("accum_steps=2", "problem.initial_weight=[0,0]", result={"final_weight": [4.0, 6.0]}),
    ]
    (comparison,) = compare(to_frame(runs))
    assert comparison.rows["final_weight_vs_baseline"].tolist() == [0.0, 5.0]
    assert "[4.0000, 6.0000] (5 away)" in table.text([comparison])


def test_a_weight_that_is_not_finite_is_no_mean() -> None:
    runs = [record("seed=0", result={"final_weight": [None, 1.0]}), record("seed=1")]
    assert "final weight" not in table.text(compare(to_frame(runs)))


def test_csv_has_the_same_columns_and_whole_numbers_also_with_a_failed_run(tmp_path: Path) -> None:
    failed = record(DIGITS, "effective_batch_size=64", "accum_steps=8", status="failed", reason='"no", he said')
    whole, mixed = to_frame(sweep()), to_frame([*sweep(), failed])
    assert list(whole.columns) == list(mixed.columns)
    exports.write_csv(mixed, tmp_path / "a.csv")
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert [row["peak_allocated_bytes"] for row in rows] == ["1000", "1000", "400", "400", ""]
    assert rows[-1]["reason"] == '"no", he said'
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_csv_follows_a_link_and_writes_into_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to(tmp_path / "real.csv")
    exports.write_csv(to_frame(sweep()), tmp_path / "link.csv")
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "real.csv").read_text().startswith("sweep_id,")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    exports.write_csv(to_frame([]), tmp_path / "pipe")
    assert os.read(reader, 100).startswith(b"sweep_id,")
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_only_what_varies_is_a_column() -> None:
    frame = to_frame(sweep())
    assert varying(frame) == ["accum_steps", "micro_batch_size"]
    (comparison,) = compare(frame)
    assert comparison.constant["effective_batch_size"] == 64
    assert comparison.constant["lr"] == 0.1
    assert not {"seed", "tracking.uri", "problem.default_epochs"} & comparison.constant.keys()


def test_keys_that_follow_from_a_name_are_no_columns_of_their_own() -> None:
    runs = [record(DIGITS), record(), record("optimizer=momentum")]
    columns = varying(to_frame(runs))
    assert "problem.name" in columns
    assert "optimizer.momentum" in columns, "SGD with and without momentum share a name"
    assert not {"problem.hidden", "problem.batches", "problem.layers"} & set(columns)
    assert len(compare(to_frame(runs))[0].rows) == 3


def test_final_weights_are_shown_where_they_are_short() -> None:
    runs = [record("lr=0.1", "seed=0", result={"final_weight": [1.0, 2.0]}), record("lr=0.1", "seed=1")]
    (comparison,) = compare(to_frame(runs))
    assert "[1.0000, 2.0000]" in table.text([comparison])
    both = [runs[0], record("lr=0.1", "seed=1", result={"final_weight": [3.0, 6.0]})]
    assert "[2.0000, 4.0000]" in table.text(compare(to_frame(both)))


def test_no_runs_are_an_empty_frame_and_a_word() -> None:
    frame = to_frame([])
    assert frame.empty
    assert "status" in frame.columns
    assert compare(frame) == []
    assert table.text([]) == "no runs"


def test_one_run_is_a_table_without_comparison() -> None:
    text = table.text(compare(to_frame([record()])))
    assert text.startswith("1 run, 1 finished")
    assert "in parentheses" not in text


def test_numbers_are_shown_to_be_read() -> None:
    runs = [
        record(DIGITS, "effective_batch_size=64", "accum_steps=1", loss=0.123456, peak=3 * 2**20, rate=123456.7),
        record(DIGITS, "effective_batch_size=64", "accum_steps=2", loss=0.1, peak=2**20, rate=9.87654),
    ]
    lines = table.text(compare(to_frame(runs))).splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("---"))
    first, second = lines[head + 1 : head + 3]
    assert first.split("  ")[-1].strip() == "123457"
    for shown in ("0.1235", "3 MiB"):
        assert shown in first
    for shown in ("0.1 (-0.023)", "1 MiB (×0.33)", "9.88 (×8e-05)"):
        assert shown in second


def test_markdown_has_as_many_cells_in_every_row() -> None:
    lines = [line for line in exports.markdown(compare(to_frame(sweep()))).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 2
    assert len({line.count("|") for line in lines}) == 1
