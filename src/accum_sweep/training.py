"""A configuration trained and measured: first a short pass for the peak of memory, then the real thing, timed."""

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accum_sweep import launch, optimizers, precision, ranks
from accum_sweep.accumulate import Window
from accum_sweep.batches import MicroBatches, count_windows, training_windows
from accum_sweep.boundary import train
from accum_sweep.config import Config
from accum_sweep.device import Clock
from accum_sweep.equivalence import Verdict
from accum_sweep.errors import UserError
from accum_sweep.history import History
from accum_sweep.ledger import Statement
from accum_sweep.memory import Peak
from accum_sweep.predict import Prediction, try_to_predict
from accum_sweep.preparation import accumulation, boundary, in_precision, notes, prepare, set_batchnorm
from accum_sweep.problems import Problem
from accum_sweep.referee import Referee
from accum_sweep.repeat import Repeating
from accum_sweep.short_pass import measure

NO_GRADIENT = "step_in_backward=true lets go of each gradient before there is a whole one to compare"
Judge = Callable[[float, float], str | None]
"""(part of the training done, loss of the window) -> why to end it; None to go on."""
State = dict[str, Tensor]  # a model's weights and buffers by name, on the CPU


class Pruned(Exception):  # noqa: N818 - a run's outcome
    """A training was ended by its judge. The message says why."""


@dataclass
class Training:
    """What there is of a training so far: filled as it goes, so that an interrupted one loses nothing."""

    stage: str = "building the problem"  # what is being done; "step": the one of the last window in `samples`
    history: History = field(default_factory=History)
    samples: list[int] = field(default_factory=list)  # by window
    data: Any = field(default_factory=hashlib.sha256)  # of which samples each window held, however they were split
    seconds: list[float] = field(default_factory=list)  # by window; empty until the end
    peak: Peak | None = None
    statement: Statement | None = None  # who holds the peak
    prediction: Prediction | None = None
    parameters: int | None = None
    initial: State | None = None
    final: State | None = None
    weights: list[str] = field(default_factory=list)  # names of what is trained in these, buffers left out
    held_out: dict[str, float] = field(default_factory=dict)  # metrics on data not trained on
    verdict: tuple[Verdict, int, list[float | None]] | None = None  # see Referee.verdict
    notes: list[str] = field(default_factory=list)  # what a user might not expect
    repeated: list[str] = field(default_factory=list)  # windows whose memory ran out: see Repeating


def train_and_measure(
    config: Config, device: torch.device, so_far: Training, repeats: bool = False, judge: Judge | None = None
) -> None:
    """Train as `config` says and fill `so_far`. Seeds torch's global generator.

    Where it `repeats`, a window whose memory runs out is repeated in smaller micro-batches, not under FSDP.
    Raises Pruned where the `judge` says so. Where several processes train together, each of them calls this, and what
    it fills is the same on all.
    """
    torch.manual_seed(config.seed)
    problem = config.problem.build(precision.weights_dtype(config.precision))
    _check_data(config, problem)
    so_far.notes = notes(config, problem.model)
    if launch.rank():
        torch.manual_seed((config.seed + launch.rank()) % 2**64)  # ranks see different samples, so other dropout
    so_far.stage = "measuring memory"
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        so_far.prediction = try_to_predict(config, problem, device)
        memory = measure(config, problem, device)
    so_far.peak, so_far.statement = memory.peak, memory.statement
    so_far.stage = "setting up"
    judged = config.equivalence != "off" and not config.step_in_backward
    twin = copy.deepcopy(problem.model).train() if judged else None
    model = prepare(config, problem.model, problem.blocks, device)
    so_far.parameters = sum(parameter.numel() for parameter in model.parameters())
    so_far.initial = _state(model)
    so_far.weights = [name for name, _ in ranks.unwrapped(model).named_parameters()]
    loss = in_precision(config, problem.loss, device)
    steps = count_windows(config) if config.lr_schedule == "cosine" or judge else 1  # the others do not ask
    lr_at = functools.partial(optimizers.lr_factor, config.lr_schedule, config.warmup_steps, steps)
    end = boundary(config, model, device, steps)
    clock = Clock(device)
    referee = None
    if twin is not None and config.equivalence != "off":
        set_batchnorm(config, twin)
        referee = Referee(
            model=twin,
            loss=functools.partial(in_precision, config, problem.loss),
            normalization=config.normalization,
            unit=precision.unit_roundoff(config.precision),
            when=config.equivalence,
            boundary=end,
            lr_at=lambda step: config.lr * lr_at(step),
            fits=memory.fits,
            aside=clock.paused,
            compiled=config.compile,
        )

    def watch(micro_batches: Any, window: Window) -> None:
        if referee is not None:
            with clock.paused():
                referee.watch(model, micro_batches, window)

    def again(model: nn.Module, form: tuple[int, ...]) -> None:
        if referee is not None:
            with clock.paused():
                referee.begins(model, form)

    repeats = repeats and config.parallel != "fsdp"
    agreement = ranks.Agreement(model) if repeats and isinstance(model, DistributedDataParallel) else None
    accumulate: Callable[[nn.Module, Any], Window] = accumulation(config, loss, end.scaler, agreement)
    repeating = None
    if repeats:
        repeating = Repeating(accumulate, again, device, config.batchnorm == "corrected_momentum", agreement)
        accumulate = repeating
        so_far.repeated = repeating.notes

    def batches() -> Iterator[MicroBatches]:
        for planned in training_windows(config, problem):
            window = planned if repeating is None else repeating.fit(planned)
            so_far.samples.append(sum(map(len, window)))
            samples = torch.cat(window).sort().values
            so_far.data.update(len(samples).to_bytes(8, "big") + samples.numpy().tobytes())
            if referee is not None:
                referee.begins(model, tuple(map(len, window)))
            clock.resume()
            yield MicroBatches(problem, window, device, launch.rank(), config.processes)

    so_far.stage = "step"
    for step in train(model, end, batches(), accumulate, watch):
        clock.lap()  # what follows is no part of a step
        so_far.history.add(step)
        if referee is not None:
            referee.ended(step)
        if judge is not None and (why := judge(len(so_far.samples) / steps, step.loss)):
            raise Pruned(why)
    so_far.seconds = clock.seconds()
    so_far.stage = "evaluating"
    if referee is not None:
        so_far.verdict = referee.verdict()
    elif config.equivalence != "off":
        so_far.verdict = Verdict("not comparable", NO_GRADIENT), 0, []
    if problem.evaluate is not None and "diverged" not in so_far.history.outcomes:
        with precision.arithmetic(config.precision, device):
            metrics = problem.evaluate(ranks.unwrapped(model), device)
        so_far.held_out = {key: float(value) for key, value in metrics.items()}
    so_far.final = _state(model)


def _check_data(config: Config, problem: Problem) -> None:
    """Raise UserError where a problem's data is not as long as its parameters said."""
    train = problem.train
    columns = list(train.items()) if isinstance(train, Mapping) else list(enumerate(train))
    for name, column in columns:
        if len(column) != config.problem.train_samples:
            said = f"{config.problem.name} says that it has {config.problem.train_samples} training samples"
            raise UserError(f"{said}, but column {name} of its data has {len(column)}; mend its train_samples or build")


def _state(model: nn.Module) -> State:
    """Return a copy of all weights and buffers on the CPU."""
    state = ranks.unwrapped(model).state_dict()
    return {name: ranks.whole(tensor.detach()).to("cpu", copy=True).contiguous() for name, tensor in state.items()}
