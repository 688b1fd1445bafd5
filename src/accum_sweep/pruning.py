"""A search's study, and in its runs the question whether to go on. The only file beside `search` that knows Optuna."""

import logging
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accum_sweep.errors import UserError
from accum_sweep.record import SweepRecord

if TYPE_CHECKING:
    import optuna

    from accum_sweep.training import Judge

STUDY_FILE = "search.db"
LOOKS = 20  # how often a run is looked at: after each of so many parts of its windows
WARM_UP = 4  # looks, a fifth of the training, after which it may be ended


def study_path(folder: Path) -> Path:
    """Return the file in a sweep's folder that holds its study."""
    return folder.absolute() / STUDY_FILE


def open_study(path: Path, objectives: Mapping[str, str], seed: int = 0) -> "optuna.Study":
    """Open the study in a file, made where there is none."""
    try:
        import optuna
    except ImportError as error:
        raise UserError("hydra/sweeper=search needs Optuna: pip install 'accum-sweep[optuna]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 60}})
    directions: list[Any] = list(objectives.values())
    study = optuna.create_study(storage=storage, study_name="search", directions=directions, load_if_exists=True)
    # Another seed where it goes on: the same would ask the same again.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.get_trials(deepcopy=False)), constant_liar=True)
    return study


def judge(sweep: SweepRecord, number: int, folder: Path) -> "Judge | None":
    """Return what judges a job of a search on its way; None where nothing does."""
    trial_number = sweep.search.get("trials", {}).get(str(number))
    if trial_number is None or not sweep.search.get("prunes"):
        return None
    import optuna

    study = open_study(study_path(folder), sweep.search["objectives"])
    trial = optuna.trial.Trial(study, study.get_trials(deepcopy=False)[trial_number]._trial_id)
    study.pruner = optuna.pruners.MedianPruner(n_warmup_steps=WARM_UP)
    since: list[float] = []
    looks = 0

    def judged(done: float, loss: float) -> str | None:
        nonlocal looks
        since.append(loss)
        if done >= 1 or int(done * LOOKS) <= looks:
            return None
        looks = int(done * LOOKS)
        trial.report(statistics.fmean(since), looks)
        since.clear()
        if trial.should_prune():
            return f"its loss after {looks / LOOKS:.0%} of the training is above the median of the trials before"
        return None

    return judged
