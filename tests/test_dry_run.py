"""sweep.dry_run=true: what it shows, and that it makes nothing."""

from pathlib import Path

from accum_sweep.record import records
from conftest import Cli

DIGITS = ("-m", "problem=digits_mlp", "effective_batch_size=64", "epochs=1", "tracking=none", "device=cpu")
DRY = "sweep.dry_run=true"


def rows(printed: str) -> list[list[str]]:
    """The cells of the table's rows: split where two blanks are."""
    table = printed.split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table[2:]]


def test_it_shows_what_a_sweep_would_do_and_makes_nothing(cli: Cli, tmp_path: Path) -> None:
    done = cli(*DIGITS, "accum_steps=1,4", "seed=0,1", DRY)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    found = rows(done.stdout)
    assert [row[:4] for row in found] == [
        [f"accum_steps={k} seed={seed}", str(k), str(64 // k), "64"] for k in (1, 4) for seed in (0, 1)
    ]
    assert [row[5] for row in found] == ["to run"] * 4
    assert "4 combinations, 0 have their result, 4 to run: time unknown; dry run, nothing was made" in done.stdout


def test_its_keys_memory_and_time_are_those_of_the_runs(cli: Cli, tmp_path: Path) -> None:
    assert cli(*DIGITS, "accum_steps=1,4", "seed=0").returncode == 0
    done = cli(*DIGITS, "accum_steps=1,4,8", "seed=0,1", DRY, "sweep.resume=latest", "sweep.extend=true")
    assert done.returncode == 0, done.stderr
    found = {row[0]: row for row in rows(done.stdout)}
    for record in records(tmp_path / "runs"):
        accum_steps = record.config["accum_steps"]
        finished, other_seed = found[f"accum_steps={accum_steps} seed=0"], found[f"accum_steps={accum_steps} seed=1"]
        assert finished[4] == record.run_key != other_seed[4]
        assert (finished[5], other_seed[5]) == ("has its result", "to run")
        assert finished[6] == other_seed[6]
        assert float(finished[6].split()[0]) == round(record.metrics["peak_allocated_bytes"] / 1024, 1)
        assert finished[7].endswith(" s")
    assert len(found["accum_steps=8 seed=0"]) == 7, "no earlier run, no time"
    assert "6 combinations, 2 have their result, 4 to run: time unknown but for 2 of 4" in done.stdout
    assert len(list(records(tmp_path / "runs"))) == 2


def test_a_single_run_has_none(cli: Cli) -> None:
    done = cli(DRY)
    assert done.returncode == 2
    assert "sweep.dry_run=True: is for a multirun, and this is none; add -m" in done.stderr
