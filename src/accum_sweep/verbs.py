"""The command line's verbs: what is done before runs, and once they are there. Each takes its arguments."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from accum_sweep import launch
from accum_sweep.errors import ConfigError, Fault, UserError, nearest
from accum_sweep.record import RUNS_FOLDER, Record, SweepRecord, records, sweeps
from accum_sweep.units import show_bytes

START_ONE = "start one: python -m accum_sweep -m accum_steps=1,2,4,8"


def summary(arguments: Sequence[str]) -> None:
    """Print the table of a sweep, and on request all its runs as CSV."""
    parser = argparse.ArgumentParser(
        prog="python -m accum_sweep summary",
        description="Compare the runs of a sweep: one row a setting, seeds folded, each against accum_steps=1.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "sweep", nargs="?", default="latest", help="latest (the default), the id of a sweep or run, or all"
    )
    parser.add_argument("--list", action="store_true", help="list the sweeps instead")
    parser.add_argument(
        "--csv", metavar="FILE", help="write every run, one row each, all columns; - is standard output"
    )
    parser.add_argument(
        "--runs", metavar="FOLDER", default=RUNS_FOLDER, help=f"where the records are (default {RUNS_FOLDER})"
    )
    options = parser.parse_args(arguments)
    folder = Path(options.runs)
    if options.list:
        _list(folder)
        return
    chosen = _choose(options.sweep, folder)
    from accum_sweep import exports, table  # pandas takes half a second that --list and errors do without
    from accum_sweep.summary import compare
    from accum_sweep.tidy import to_frame

    frame = to_frame(chosen)
    if options.csv:
        try:
            exports.write_csv(frame, None if options.csv == "-" else Path(options.csv))
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(
                f"--csv {options.csv}: cannot be written ({error.strerror}); choose another file"
            ) from error
    if options.csv != "-":
        print(table.text(compare(frame, _objectives(chosen, folder))))


def plan(arguments: Sequence[str]) -> None:
    """Print what each split of an effective batch would need, and which to take."""
    parser = argparse.ArgumentParser(
        prog="python -m accum_sweep plan",
        description="Predict the peak of memory for every split of an effective batch, without training. The settings "
        "are a run's, such as problem=char_gpt effective_batch_size=64 memory_budget=8GiB device=cuda; the device need "
        "not be there.",
        allow_abbrev=False,
    )
    parser.add_argument("setting", nargs="*", help="key=value, as for a run")
    for name, what in (("csv", "one row a split"), ("json", "all of it"), ("plot", "a picture, by its suffix")):
        parser.add_argument(f"--{name}", metavar="FILE", help=f"write {what}; - is standard output")
    options = parser.parse_intermixed_args(arguments)
    outputs = {name: given for name in ("csv", "json", "plot") if (given := getattr(options, name)) is not None}
    _refuse_unwritable(outputs)
    if launch.world_size() > 1:
        raise UserError("plan: several processes are not predicted; start it without torchrun")
    from accum_sweep.check import check
    from accum_sweep.compose import compose

    try:
        settings = compose(options.setting)
        effective = settings.get("effective_batch_size")
        unsplit = settings.get("accum_steps") is None and settings.get("micro_batch_size") is None
        if unsplit and isinstance(effective, int | float) and effective is not True and effective % 1 == 0 < effective:
            # Any split will do, and this one exists: every one is planned.
            settings["accum_steps"] = 1 if settings.get("step_in_backward") is True else effective
        config = check(settings)
    except UserError as error:
        if str(error).endswith("add -m"):  # which is for runs
            raise UserError(
                f"{str(error).partition(': ')[0]}: plan takes one value a key; it shows every split"
            ) from error
        raise
    from accum_sweep import plan_report  # torch takes seconds that help and errors do without
    from accum_sweep.plan import make

    if options.plot not in (None, "-") and Path(options.plot).suffix.lower() not in plan_report.suffixes():
        known = " ".join(sorted(plan_report.suffixes()))
        raise UserError(f"--plot {options.plot}: the suffix says what is drawn, and is one of {known}")
    made = make(config)
    if options.csv:
        plan_report.put("--csv", options.csv, plan_report.as_csv(made))
    if options.json:
        plan_report.put("--json", options.json, plan_report.as_json(made))
    if options.plot:
        plan_report.draw(made, None if options.plot == "-" else Path(options.plot))
    if "-" not in outputs.values():
        print(plan_report.text(made))
    if config.memory_budget is not None and made.recommended is None:
        enough = show_bytes(made.enough_bytes, up=True)
        rule = "is too small for every split"
        raise ConfigError([Fault("memory_budget", show_bytes(config.memory_budget), rule, f"give {enough} or more")])


def _refuse_unwritable(outputs: dict[str, str]) -> None:
    """Raise UserError where options name one file twice, or one that cannot be written."""
    for option, where in outputs.items():
        others = [other for other, path in outputs.items() if other < option and _same(path, where)]
        if others:
            what = "standard output" if where == "-" else where
            raise UserError(f"--{others[0]} and --{option} cannot share {what}; give all but one another file")
        if where == "-":
            continue
        path = Path(where)
        folder = path.absolute().parent
        rule = "no file's name" if not where else "a folder" if path.is_dir() else ""
        if not rule and not folder.is_dir():
            rule = f"cannot be written (no folder {folder})"
        elif not rule and not os.access(folder, os.W_OK):
            rule = f"cannot be written (no right to write in {folder})"
        if rule:
            raise UserError(f"--{option} {where or chr(39) * 2}: {rule}; choose another file")


def _same(one: str, other: str) -> bool:
    return one == other or (os.path.realpath(one) == os.path.realpath(other) and "-" not in (one, other))


def sync(arguments: Sequence[str]) -> None:
    """Send to MLflow what it is missing of the records on disk."""
    parser = argparse.ArgumentParser(
        prog="python -m accum_sweep sync",
        description="Send to MLflow the runs that it is missing, each once, however often this is called, and end what "
        "a killed process has left running there. Each run goes to the store it was made for.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--runs", metavar="FOLDER", default=RUNS_FOLDER, help=f"where the records are (default {RUNS_FOLDER})"
    )
    options = parser.parse_args(arguments)
    from accum_sweep.sync import sync as send

    print(send(Path(options.runs)))


VERBS: dict[str, Callable[[Sequence[str]], None]] = {"summary": summary, "plan": plan, "sync": sync}


def _list(folder: Path) -> None:
    """Print one line a sweep: its id, how its runs ended, and what was typed."""
    found = sweeps(folder)
    if not found:
        print(f"no sweeps in {folder} yet; {START_ONE}")
    for path, sweep in found:
        print(f"{sweep.sweep_id}  {_state(sweep, list(records(path)))}  {' '.join(sweep.overrides)}")


def _state(sweep: SweepRecord, runs: Sequence[Record]) -> str:
    finished = sum(record.status == "finished" for record in runs)
    return f"{finished}/{sweep.size} finished"


def _objectives(chosen: Sequence[Record], folder: Path) -> Mapping[str, str] | None:
    """Return what the search was for that all these runs are of; None where they are of none."""
    ids = {record.sweep_id for record in chosen}
    found = [sweep.search.get("objectives") for _, sweep in sweeps(folder) if ids == {sweep.sweep_id}]
    return found[0] if found else None


def _choose(which: str, folder: Path) -> list[Record]:
    """Return the records of the sweep or run called `which`; raise UserError where there is none."""
    known = {sweep.sweep_id: path for path, sweep in sweeps(folder)}
    if which == "latest" and known:
        return list(records(list(known.values())[-1]))
    if which in known:
        return list(records(known[which]))
    everything = list(records(folder))
    if which in ("latest", "all"):
        if which == "all" and everything:
            return everything
        raise UserError(f"summary: no {'runs' if which == 'all' else 'sweeps'} in {folder} yet; {START_ONE}")
    single = [record for record in everything if record.run_id == which]
    if not single:
        ids = [*known, *(record.run_id for record in everything if record.sweep_id is None)]
        remedy = nearest(which, ids, "see summary --list")
        raise UserError(f"summary {which}: there is no such sweep or run in {folder}; {remedy}")
    return single
