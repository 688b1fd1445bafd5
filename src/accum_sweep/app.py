"""The Hydra application: the command line without a verb, the task Hydra calls for each job, and `run` for Python."""

import contextlib
import gc
import json
import logging
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from accum_sweep import launch
from accum_sweep.check import check
from accum_sweep.compose import COMPOSITION_ERRORS, CONF, HYDRA_VERSION_BASE, as_dict, compose, explain
from accum_sweep.config import Config
from accum_sweep.errors import ConfigError, Fault, RunsFailed, UserError, interrupted, nearest, without_secrets
from accum_sweep.record import RECORD_FILE, RUNS_FOLDER, Identity, Record, SweepRecord, read_sweep
from accum_sweep.verbs import VERBS

if TYPE_CHECKING:
    from accum_sweep.training import Judge

log = logging.getLogger(__name__)

OUR_SWEEPERS = ("hydra_plugins.accum_sweep.AccumSweeper", "hydra_plugins.accum_sweep.SearchSweeper")
QUIET = [f"hydra.{kind}_logging.loggers.accum_sweep.level=WARNING" for kind in ("job", "hydra")]


def main(arguments: Sequence[str]) -> None:
    """Run or multirun as Hydra understands `arguments`; raise UserError or RunsFailed where that ends badly.

    Of several processes that torchrun has started, the first does so; the others do the same, but what they write goes
    into a folder that is thrown away.
    """
    if launch.rank() == 0:
        _main(arguments)
        return
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere:
        there = [f"hydra.run.dir='{folder}/run'", f"hydra.sweep.dir='{folder}/sweep'", "tracking=none"]
        with contextlib.redirect_stdout(nowhere):
            _main([*arguments, *there, "-q"])


def _main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    quiet = [word for word in arguments if word in ("-q", "--quiet")]
    others = [word for word in arguments if word not in quiet and word not in options.overrides]
    # Overrides first: an option that may have a value, like --info, does not take one of them for it.
    sys.argv[1:] = [*options.overrides, *(QUIET if quiet else []), *others]
    # Hydra prints what goes wrong and exits with 1, unless told to hand it on.
    debug = os.environ.get("HYDRA_FULL_ERROR") == "1"  # the user's wish to see tracebacks
    os.environ["HYDRA_FULL_ERROR"] = "1"
    _unfinished.clear()
    _begun.clear()
    application = hydra.main(config_path=str(CONF), config_name="config", version_base=HYDRA_VERSION_BASE)(task)
    try:
        application()
    except COMPOSITION_ERRORS as error:
        raise explain(error, options.overrides, options.config_dir) from error
    except (UserError, RunsFailed, BrokenPipeError):
        raise
    except Exception as error:
        if interrupted(error):
            raise KeyboardInterrupt from error
        if _begun or debug:
            raise
        # Hydra's own checks of groups, folders, logging and launchers raise ValueErrors, OSErrors and others.
        raise UserError(f"Hydra cannot start this ({type(error).__name__}: {without_secrets(str(error))})") from error
    finally:
        GlobalHydra.instance().clear()
        if not debug:
            del os.environ["HYDRA_FULL_ERROR"]
    if _unfinished:
        raise RunsFailed("\n".join(_unfinished))


def _parse(arguments: Sequence[str]) -> Namespace:
    """Return Hydra's own reading of the words; raise UserError for an unknown option, or a word that means nothing."""
    parser = get_args_parser()
    parser.add_argument("--quiet", "-q", action="store_true")
    options, unknown = parser.parse_known_intermixed_args(list(arguments))
    known = [name for action in parser._actions for name in action.option_strings]
    wrong = [f"{word}: is no known option; {nearest(word, known, 'see --help')}" for word in unknown]
    for word in options.overrides[:1]:
        if word.isidentifier():
            wrong.append(f"{word}: is no command and no key=value; {nearest(word, VERBS, 'see --help')}")
    chosen = [name for name in ("--cfg", "--info", "--multirun", "--run") if getattr(options, name[2:])]
    if len(chosen) > 1:
        wrong.append(f"{' and '.join(chosen)} exclude each other; give one of them")
    if wrong:
        raise UserError("\n".join(wrong))
    return options


class CheckFirst(Callback):
    """Refuses a bad single run before Hydra makes its folder. (The sweeper checks the runs of a multirun.)"""

    def on_run_start(self, config: DictConfig, **_: object) -> None:
        """Check; the exit is a SystemExit because Hydra turns a callback's exceptions into warnings."""
        from accum_sweep.tracking import open_tracker

        try:
            _check_hydra(config)
            checked = check(as_dict(config))
            for key, value in (("resume", checked.sweep.resume), ("dry_run", checked.sweep.dry_run)):
                if value:
                    raise ConfigError([Fault(f"sweep.{key}", value, "is for a multirun, and this is none", "add -m")])
            open_tracker(checked.tracking)
            if (Path(config.hydra.run.dir) / RECORD_FILE).exists():
                fault = Fault("hydra.run.dir", config.hydra.run.dir, "holds a run already", "choose another")
                raise ConfigError([fault])
        except Exception as error:
            _refuse(error)

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        """Check what the sweeper cannot: whether it is ours."""
        try:
            _check_hydra(config)
        except UserError as error:
            _refuse(error)


def _check_hydra(config: DictConfig) -> None:
    """Raise ConfigError for settings of Hydra's under which runs would be lost."""
    faults = []
    if config.hydra.job.chdir:
        rule = "would move each run away from its records and database"
        faults.append(Fault("hydra.job.chdir", "true", rule, "leave it out"))
    sweeper = str(config.hydra.sweeper._target_)
    if sweeper not in OUR_SWEEPERS:
        faults.append(Fault("hydra/sweeper", sweeper, "keeps no record of the sweep", "leave it out"))
    if faults:
        raise ConfigError(faults)


def _refuse(error: Exception) -> NoReturn:
    print(without_secrets(str(error)), file=sys.stderr)
    raise SystemExit(2) from error


# What became of the run that the command line asked for, if it did not finish. Not raised in the task: Hydra would say
# "Error executing job" to that, and call no more callbacks.
_unfinished: list[str] = []
_begun: list[bool] = []  # whether a task has begun: what goes wrong before that, the command line did


def task(composed: DictConfig) -> float | None:
    """Execute one job of Hydra's and return its last loss; a single run prints its result."""
    _begun.append(True)
    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    overrides = list(job.overrides.task)
    config = check(as_dict(composed))
    if job.mode == RunMode.MULTIRUN:
        sweep = read_sweep(Path(job.sweep.dir))
        assert sweep is not None, "the sweeper writes the sweep before its first job"
        number = int(job.job.num)
        identity = Identity(f"{sweep.sweep_id}/{number}", sweep.names[number], overrides, sweep.sweep_id, number)
        judge = _judge(sweep, number, Path(job.sweep.dir))
        record, _ = _execute(config, folder, identity, sweep.parent_run_id, sweep.skipped.get(number), judge)
        _clear_away()
        return record.metrics.get("last_loss")
    record, look = _single(config, folder, overrides)
    log.info("%s", "\n".join(filter(None, [f"record: {os.path.relpath(folder)}/record.json", look])))
    if record.status == "finished":
        print(json.dumps(record.result))
    else:
        _unfinished.append(f"{record.status}: {record.reason}")
    return record.metrics.get("last_loss")


def _clear_away() -> None:
    """Collect the garbage of a job: configurations, whose parts know each other, 0.7 MB of them.

    After the first job what is left, modules above all, is set aside: to look through it takes as long as a small run.
    """
    gc.collect()
    if gc.get_freeze_count() == 0:
        gc.freeze()


def run(overrides: Sequence[str] = ()) -> Record:
    """Execute one run, as `python -m accum_sweep OVERRIDES` does, and return its record.

    The record's `result` is the dictionary that the command prints; `status` says whether it finished. Raises
    ConfigError, before anything is written, where the configuration is wrong.
    """
    if isinstance(overrides, str):
        raise TypeError(f"overrides must be a list of strings, such as [{overrides!r}]")
    config = check(compose(overrides))
    folder = Path(RUNS_FOLDER) / datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    record, _ = _single(config, folder, list(overrides))
    return record


def _single(config: Config, folder: Path, overrides: list[str]) -> tuple[Record, str | None]:
    return _execute(config, folder, Identity(folder.name, " ".join(overrides) or config.problem.name, overrides))


def _judge(sweep: SweepRecord, number: int, folder: Path) -> "Judge | None":
    if not sweep.search:
        return None
    from accum_sweep.pruning import judge

    return judge(sweep, number, folder)


def _execute(
    config: Config,
    folder: Path,
    identity: Identity,
    parent: str | None = None,
    skipped: str | None = None,
    judge: "Judge | None" = None,
) -> tuple[Record, str | None]:
    """Execute, or say why not (`skipped`), then track; return the record and where to look at it."""
    from accum_sweep.tracking import open_tracker

    tracker = open_tracker(config.tracking)
    record = _record(config, folder, identity, skipped, judge)
    look = None
    if tracker is not None:
        with tracker.tolerant(f"run {record.run_id}"):
            look = tracker.how_to_look(tracker.log_run(record, folder, parent))
    if record.status == "interrupted":
        log.warning("interrupted; what there is stands in %s/record.json", os.path.relpath(folder))
        raise KeyboardInterrupt
    return record, look


def _record(config: Config, folder: Path, identity: Identity, skipped: str | None, judge: "Judge | None") -> Record:
    if skipped is not None:
        from accum_sweep.untrained import leave

        return leave(config, folder, identity, "skipped", skipped)
    if config.memory_limit is not None:
        from accum_sweep.own_process import execute_apart

        return execute_apart(config, folder, identity)
    from accum_sweep.execute import execute

    return execute(config, folder, identity, judge)
