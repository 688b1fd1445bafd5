"""`hydra/sweeper=search`: Optuna says what to try next, a launcher runs it, and the records say how good it was.

Optuna's study stands beside the sweep's record, so that a search that was killed goes on.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from accum_sweep import resume
from accum_sweep.conduct import Multirun, conduct
from accum_sweep.errors import ConfigError, Fault, UserError
from accum_sweep.jobs import Job, combine, word
from accum_sweep.pruning import open_study, study_path
from accum_sweep.record import Record, SweepRecord, read, read_sweep
from accum_sweep.sweep import alone, check_sweep, move, way_of
from accum_sweep.tracking import open_tracker

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

DIRECTIONS = ("minimize", "maximize")
GRID_ONLY = ("pairs", "where", "subset", "dry_run", "extend")


@dataclass(frozen=True)
class Options:
    """Keys under `hydra.sweeper`."""

    trials: Any  # how many, those that fail or are pruned among them
    minimize: Any  # the metrics of a run that are to be small
    maximize: Any  # and those that are to be large
    at_once: Any  # how many are asked for, and run, together
    pruning: Any  # whether hopeless runs are ended early: with one objective that is a loss
    seed: Any

    def __post_init__(self) -> None:
        """Raise ConfigError with all that is wrong."""
        faults = []
        for key, least in (("trials", 1), ("at_once", 1), ("seed", 0)):
            value = getattr(self, key)
            if type(value) is not int or value < least:
                rule = f"must be a whole number, {least} or more"
                faults.append(Fault(f"hydra.sweeper.{key}", value, rule, f"for example {key}={least + 9}"))
        if not isinstance(self.pruning, bool):
            faults.append(Fault("hydra.sweeper.pruning", self.pruning, "must be true or false", "for example true"))
        for key in DIRECTIONS:
            value = getattr(self, key)
            if not isinstance(value, list) or not all(isinstance(metric, str) for metric in value):
                rule = "must be a list of metrics of a run"
                faults.append(Fault(f"hydra.sweeper.{key}", value, rule, f"for example {key}=[test/loss]"))
        if not faults and not (self.minimize or self.maximize):
            rule = "must name a metric, or maximize must"
            faults.append(Fault("hydra.sweeper.minimize", "[]", rule, "for example minimize=[test/loss]"))
        if faults:
            raise ConfigError(faults)

    @property
    def objectives(self) -> dict[str, str]:
        """Return which way each metric is to go."""
        return dict.fromkeys(self.minimize, "minimize") | dict.fromkeys(self.maximize, "maximize")

    @property
    def prunes(self) -> bool:
        """Whether a run is ended by its training loss: only where that is what is looked for."""
        return bool(self.pruning) and [(way, "loss" in metric) for metric, way in self.objectives.items()] == [
            ("minimize", True)
        ]


def search(
    params: Sequence[str],
    arguments: Sequence[str],
    options: Options,
    config: DictConfig,
    context: HydraContext,
    task: TaskFunction,
) -> None:
    """Try `options.trials` settings of the keys that are given as ranges or choices; print the table and the best.

    Raises UserError before anything is written where a setting is wrong, RunsFailed at the end where runs failed.
    """
    texts = [*params, *arguments]
    overrides = OverridesParser.create(config_loader=context.config_loader).parse_overrides(texts)
    spaces = {override.key_or_group: _space(override) for override in overrides if override.is_sweep_override()}
    if not spaces:
        raise UserError("hydra/sweeper=search: there is nothing to search; give a key as lr=interval(0.01,1)")
    fixed = [str(override.input_line) for override in overrides if not override.is_sweep_override()]
    makes = _Maker(fixed, config, context)
    example = makes.job({key: _first(space) for key, space in spaces.items()})
    given, way = example.config.sweep, way_of(config)
    folder, plan = Path(config.hydra.sweep.dir), None
    if given.resume is not None:
        folder, plan = resume.find(given.resume, folder)
        move(config, folder)
    check_sweep([example.config], folder, way, fresh=plan is None)
    _check(example, way.seen)
    about = {"keys": {key: repr(space) for key, space in spaces.items()}, "objectives": options.objectives}
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
    tracker = open_tracker(example.config.tracking)
    with alone(folder):
        if plan is None:
            name = "search over " + " ".join(spaces)
            tracking = example.config.tracking.model_dump()
            plan = SweepRecord.begun(folder.name, arguments, name, tracking, search=about | {"trials": {}})
        else:
            plan = read_sweep(folder) or plan
            _check_same(plan, about)
        plan.search["prunes"] = options.prunes
        multirun = Multirun(plan, folder, launcher, way, tracker)
        multirun.add([])
        study = open_study(study_path(folder), options.objectives, options.seed)
        searching = _Search(study, spaces, options, makes, multirun)
        conduct(multirun, searching.run)
        print(searching.best())


@dataclass(frozen=True)
class _Maker:
    """Makes jobs of what is tried."""

    fixed: list[str]
    config: DictConfig
    context: HydraContext

    def job(self, values: Mapping[str, Any]) -> Job:
        """Return the job; raise ConfigError where these values do not go together."""
        texts = [f"{key}={word(value)}" for key, value in values.items()]
        (job,) = combine([*self.fixed, *texts], self.config, self.context)
        return replace(job, name=" ".join(texts))


class _Search:
    """Asks for settings, has them run, and tells what came of them."""

    def __init__(
        self, study: "optuna.Study", spaces: dict[str, Any], options: Options, makes: _Maker, multirun: Multirun
    ) -> None:
        self._study, self._spaces, self._options, self._makes, self._multirun = study, spaces, options, makes, multirun
        self._known: dict[str, Record] = {}  # what was run before, by key

    def run(self) -> None:
        """Go on until there were as many trials as wanted."""
        self._take_up()
        while (left := self._options.trials - self._ended()) > 0:
            asked = self._ask(min(left, self._options.at_once))
            jobs = list({job.key: job for _, job in asked}.values())
            first = len(self._multirun.plan.jobs)
            trials = self._multirun.plan.search["trials"]
            trials |= {str(first + place): trial.number for place, (trial, _) in enumerate(_firsts(asked))}
            if jobs:
                self._multirun.add(jobs)
                goes_on = self._multirun.launch(jobs)
                self._remember(first)
                for trial, job in asked:
                    self._tell(trial.number, self._known.get(job.key))
                if not goes_on:
                    return

    def best(self) -> str:
        """Say which settings were best: one, or of several objectives those that none is better than in all."""
        metrics = list(self._options.objectives)
        if not [trial for trial in self._study.trials if trial.values]:
            return "no trial has come to its end"
        chosen = self._study.best_trials
        seen, lines = set(), []
        for trial in sorted(chosen, key=lambda trial: trial.values):
            text = " ".join(f"{key}={word(value)}" for key, value in trial.params.items())
            if text not in seen:
                seen.add(text)
                values = ", ".join(f"{metric} {value:.4g}" for metric, value in zip(metrics, trial.values, strict=True))
                lines.append(f"{text}: {values}")
        states = [trial.state.name for trial in self._study.trials]
        count = f"{len(states)} trials, {states.count('PRUNED')} pruned, {states.count('FAIL')} failed"
        if len(metrics) == 1:
            return f"best of {count}: {lines[0]}"
        return "\n".join(
            [f"none is better in all objectives (Pareto set of {count}):", *(f"  {line}" for line in lines)]
        )

    def _ended(self) -> int:
        return sum(trial.state.is_finished() for trial in self._study.get_trials(deepcopy=False))

    def _ask(self, number: int) -> list[tuple["optuna.Trial", Job]]:
        """Return trials that are to be run; others are told at once: what was run before, and what is no setting."""
        asked = []
        for _ in range(number):
            trial = self._study.ask(self._spaces)
            try:
                job = self._makes.job(trial.params)
            except ConfigError as error:
                log.info("trial %s: %s", trial.number, str(error).splitlines()[0])
                self._tell(trial.number, None)
                continue
            if job.key in self._known:
                self._tell(trial.number, self._known[job.key])
            else:
                asked.append((trial, job))
        return asked

    def _tell(self, number: int, record: Record | None) -> None:
        from optuna.trial import TrialState

        if record is not None and record.status == "pruned":
            self._study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)
        elif record is None or record.status != "finished":
            self._study.tell(number, state=TrialState.FAIL, skip_if_finished=True)
        else:
            self._study.tell(number, _values(record, self._options.objectives), skip_if_finished=True)

    def _remember(self, first: int) -> None:
        """Read the records of the jobs from this number on, those that were tried again too."""
        plan = self._multirun.plan
        for number in range(first, len(plan.jobs)):
            if (record := read(self._multirun.folder / str(number))) is not None:
                self._known[plan.keys[number]] = record

    def _take_up(self) -> None:
        """Tell what came of trials that a killed search was at; what it did not come to is asked for again."""
        from optuna.trial import TrialState

        self._remember(0)
        self._known = {
            key: record for key, record in self._known.items() if record.status in (*resume.RESULTS, "pruned")
        }
        keys = {
            trial: self._multirun.plan.keys[int(job)] for job, trial in self._multirun.plan.search["trials"].items()
        }
        for trial in self._study.get_trials(states=(TrialState.RUNNING,)):
            record = self._known.get(keys.get(trial.number, ""))
            self._tell(trial.number, record)
            if record is None:
                self._study.enqueue_trial(trial.params)


def _firsts(asked: Sequence[tuple["optuna.Trial", Job]]) -> list[tuple["optuna.Trial", Job]]:
    """Return the first trial of each job."""
    return list({job.key: (trial, job) for trial, job in reversed(asked)}.values())[::-1]


def _values(record: Record, objectives: Mapping[str, str]) -> list[float]:
    """Return what the objectives are for a run; raise UserError where it has no such metric."""
    found = []
    for metric in objectives:
        value = record.metrics.get(metric)
        if value is None:
            there = ", ".join(sorted(key for key, number in record.metrics.items() if number is not None))
            raise UserError(f"hydra.sweeper: {metric} is no metric of these runs; choose from {there}")
        found.append(float(value))
    return found


def _space(override: Override) -> Any:
    """Return what a key may be, in Optuna's words."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    key, value = override.key_or_group, override.value()
    log_scale = "log" in getattr(value, "tags", ())
    try:
        if isinstance(value, IntervalSweep) and value.start is not None and value.end is not None:
            if isinstance(value.start, int) and isinstance(value.end, int):
                return IntDistribution(value.start, value.end, log=log_scale)
            return FloatDistribution(value.start, value.end, log=log_scale)
        if isinstance(value, RangeSweep) and value.start is not None and value.stop is not None:
            numbers = list(value.range())
            return CategoricalDistribution([type(value.start)(number) for number in numbers])
        if isinstance(value, ChoiceSweep):
            choices: list[Any] = list(override.sweep_iterator())
            return CategoricalDistribution(choices)
    except ValueError as error:
        raise ConfigError([Fault(key, override.input_line, f"is no range ({error})", "mend its ends")]) from error
    remedy = "use interval(a,b), tag(log, interval(a,b)), or choice(a,b,c)"
    raise ConfigError([Fault(key, override.input_line, "cannot be searched", remedy)])


def _first(space: Any) -> Any:
    return space.choices[0] if hasattr(space, "choices") else space.low


def _check(example: Job, seen: bool) -> None:
    """Raise ConfigError for what only a grid has."""
    given = example.config.sweep
    faults = [
        Fault(f"sweep.{key}", value, "is for a grid of combinations, and this is a search", "leave it out")
        for key in GRID_ONLY
        if (value := getattr(given, key)) not in (None, False)
    ]
    if not seen:
        faults.append(
            Fault(
                "hydra.sweep.subdir", "another", "must be as it is, where a search looks for its runs", "leave it out"
            )
        )
    if faults:
        raise ConfigError(faults)


def _check_same(plan: SweepRecord, about: dict[str, Any]) -> None:
    """Raise ConfigError where a search is continued as another one."""
    before = {key: plan.search.get(key) for key in about}
    if before != about:
        differing = next(key for key in about if before[key] != about[key])
        rule = f"was started with other {differing}: {before[differing] or 'none, it was no search'}"
        raise ConfigError([Fault("sweep.resume", plan.sweep_id, rule, "give its own, or leave sweep.resume out")])
