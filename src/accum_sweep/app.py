"""The Hydra application: the command line without a verb, the task Hydra calls for each job, and `run` for Python."""

import json
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from accum_sweep.compose import COMPOSITION_ERRORS, CONF, HYDRA_VERSION_BASE, as_dict, compose, explain
from accum_sweep.config import Config, check
from accum_sweep.errors import RunsFailed, UserError, nearest
from accum_sweep.record import RUNS_FOLDER, Identity, Record, read_sweep
from accum_sweep.verbs import VERBS

log = logging.getLogger(__name__)

QUIET = [f"hydra.{kind}_logging.loggers.accum_sweep.level=WARNING" for kind in ("job", "hydra")]


def main(arguments: Sequence[str]) -> None:
    """Run or multirun as Hydra understands `arguments`; raise UserError or RunsFailed where that ends badly."""
    quiet = [argument for argument in arguments if argument in ("-q", "--quiet")]
    passed = [argument for argument in arguments if argument not in quiet] + (QUIET if quiet else [])
    options = _parse(passed)
    # Hydra prints what goes wrong and exits with 1, unless told to hand it on.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv[1:] = passed
    application = hydra.main(config_path=str(CONF), config_name="config", version_base=HYDRA_VERSION_BASE)(task)
    try:
        application()
    except COMPOSITION_ERRORS as error:
        search = [f"hydra.searchpath=['{Path(options.config_dir).absolute()}']"] if options.config_dir else []
        raise explain(error, [*search, *options.overrides]) from error
    finally:
        GlobalHydra.instance().clear()


def _parse(arguments: Sequence[str]) -> Namespace:
    """Return Hydra's own reading of its options; raise UserError for an unknown one, or a word that means nothing."""
    parser = get_args_parser()
    options, unknown = parser.parse_known_args(arguments)
    for argument in unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        raise UserError(f"{argument}: is no known option; {nearest(argument, known, 'see --help')}")
    for word in options.overrides[:1]:
        if word.isidentifier():
            raise UserError(f"{word}: is no command and no key=value; {nearest(word, VERBS, 'see --help')}")
    return options


class CheckFirst(Callback):
    """Refuses a bad single run before Hydra makes its folder. (The sweeper checks the runs of a multirun.)"""

    def on_run_start(self, config: DictConfig, **_: object) -> None:
        """Check; the exit is a SystemExit because Hydra turns a callback's exceptions into warnings."""
        from accum_sweep.tracking import open_tracker

        try:
            open_tracker(check(as_dict(config)).tracking)
        except UserError as error:
            print(error, file=sys.stderr)
            raise SystemExit(2) from error


def task(composed: DictConfig) -> float | None:
    """Execute one job of Hydra's and return its last loss; a single run prints its result and fails aloud."""
    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    overrides = list(job.overrides.task)
    config = check(as_dict(composed))
    if job.mode == RunMode.MULTIRUN:
        sweep = read_sweep(Path(job.sweep.dir))
        assert sweep is not None, "the sweeper writes the sweep before its first job"
        number = int(job.job.num)
        identity = Identity(f"{sweep.sweep_id}/{number}", sweep.names[number], overrides, sweep.sweep_id, number)
        record, _ = _execute(config, folder, identity, sweep.parent_run_id)
        return record.metrics.get("last_loss")
    record, look = _single(config, folder, overrides)
    log.info("%s", "\n".join(filter(None, [f"record: {os.path.relpath(folder)}/record.json", look])))
    if record.status != "finished":
        raise RunsFailed(f"{record.status}: {record.reason}")
    print(json.dumps(record.result))
    return record.metrics.get("last_loss")


def run(overrides: Sequence[str] = ()) -> Record:
    """Execute one run, as `python -m accum_sweep OVERRIDES` does, and return its record.

    The record's `result` is the dictionary that the command prints; `status` says whether it finished. Raises
    ConfigError, before anything is written, where the configuration is wrong.
    """
    config = check(compose(overrides))
    folder = Path(RUNS_FOLDER) / datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    record, _ = _single(config, folder, list(overrides))
    return record


def _single(config: Config, folder: Path, overrides: list[str]) -> tuple[Record, str | None]:
    return _execute(config, folder, Identity(folder.name, " ".join(overrides) or config.problem.name, overrides))


def _execute(config: Config, folder: Path, identity: Identity, parent: str | None = None) -> tuple[Record, str | None]:
    """Execute, then track; return the record and where to look at it."""
    from accum_sweep.execute import execute
    from accum_sweep.tracking import open_tracker, tolerated

    tracker = open_tracker(config.tracking)
    record = execute(config, folder, identity)
    look = None
    if tracker is not None:
        with tolerated(f"run {record.run_id}"):
            look = tracker.how_to_look(tracker.log_run(record, folder, parent))
    if record.status == "interrupted":
        raise KeyboardInterrupt
    return record, look
