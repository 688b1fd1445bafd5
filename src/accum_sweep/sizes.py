"""The sizes and the length of a run, from those that are given. What nobody gives comes from the problem."""

import math

from accum_sweep.errors import ConfigError, Fault
from accum_sweep.problems import ProblemParams

SIZES = ("accum_steps", "micro_batch_size", "effective_batch_size")
Sizes = tuple[int, int | None, int | None]  # in that order


def derive_sizes(
    accum: int | None, micro: int | None, effective: int | None, problem: ProblemParams, processes: int, exact: bool
) -> Sizes:
    """Return all three sizes: a window is `accum` micro-batches of up to `micro` samples on each of the processes.

    The last two are None where the problem's unequal mini-batches are taken as written. Where an effective batch does
    not divide, its micro-batches are of unequal size (`split`), which needs `exact` weights. Raises ConfigError where
    sizes contradict each other, do not divide, or are larger than the data.
    """
    given_micro = micro
    if effective is None:
        accum = accum or _own_accum_steps(problem, processes)
        micro = micro or _own_size(problem)
        effective = accum * micro * processes if micro is not None else None
        return accum, _fitting(micro, given_micro, accum, effective, problem), effective
    given = ", ".join(f"{key}={value}" for key, value in zip(SIZES, (accum, micro), strict=False) if value)
    if accum is not None and micro is not None:
        if accum * micro * processes != effective:
            product = " x ".join(map(str, [accum, micro] + [processes] * (processes > 1)))
            rule = f"{product} is {accum * micro * processes}, not {effective}"
            found = f"{accum} with micro_batch_size={micro} and effective_batch_size={effective}"
            raise ConfigError([Fault("accum_steps", found, rule, "give any two of the three, the third follows")])
    elif micro is not None:
        if micro > math.ceil(effective / processes):
            rule = f"is more than a process's share of effective_batch_size={effective}"
            raise ConfigError([Fault("micro_batch_size", micro, rule, "lower it, or raise effective_batch_size")])
        accum = math.ceil(effective / (micro * processes))
    else:
        accum = accum or _own_accum_steps(problem, processes)
        given = f"accum_steps={accum}"
        if accum * processes > effective:
            rule = f"is fewer samples than the {accum * processes} micro-batches of a window"
            remedy = "lower accum_steps or raise effective_batch_size"
            raise ConfigError([Fault("effective_batch_size", f"{effective} with {given}", rule, remedy)])
        micro = math.ceil(effective / (accum * processes))
    if accum * micro * processes != effective and not exact:
        rule = "must be divided evenly unless micro-batches are weighted by what they hold"
        remedy = "use normalization=items, or sizes that divide"
        raise ConfigError([Fault("effective_batch_size", f"{effective} with {given}", rule, remedy)])
    return accum, _fitting(micro, given_micro, accum, effective, problem), effective


def split(effective: int, micro: int, pieces: int) -> tuple[int, ...]:
    """Return the sizes of `pieces` micro-batches of up to `micro` samples that make up `effective`.

    All are of `micro` samples and the last holds the rest, where that leaves it any; otherwise they are as equal as
    can be.
    """
    rest = effective - (pieces - 1) * micro
    if rest > 0:
        return (micro,) * (pieces - 1) + (rest,)
    small, larger = divmod(effective, pieces)
    return (small + 1,) * larger + (small,) * (pieces - larger)


def derive_length(steps: int | None, epochs: int | None, problem: ProblemParams) -> tuple[int | None, int | None]:
    """Return steps and epochs, one of them None; raise ConfigError where both are given."""
    if steps is not None and epochs is not None:
        rule = "steps and epochs exclude each other"
        raise ConfigError([Fault("steps", f"{steps} with epochs={epochs}", rule, "give one of them")])
    if steps is None and epochs is None:
        return (None, problem.default_epochs) if problem.default_epochs else (problem.default_steps or 1, None)
    return steps, epochs


def _own_accum_steps(problem: ProblemParams, processes: int) -> int:
    written = math.ceil(len(problem.written_micro_batch_sizes or ()) / processes)
    return problem.default_accum_steps or written or 1


def _fitting(
    micro: int | None, given: int | None, accum: int, effective: int | None, problem: ProblemParams
) -> int | None:
    """Return `micro`; raise ConfigError where it is larger than the data."""
    if micro is not None and micro > problem.train_samples:
        rule = f"is more than the {problem.train_samples} training samples of problem {problem.name}"
        if given is not None:
            raise ConfigError([Fault("micro_batch_size", micro, rule, "lower it")])
        derived = f"{micro} (from effective_batch_size={effective} and accum_steps={accum})"
        remedy = "raise accum_steps or lower effective_batch_size"
        raise ConfigError([Fault("micro_batch_size", derived, rule, remedy)])
    return micro


def _own_size(problem: ProblemParams) -> int | None:
    """Return the micro-batch size a problem has of itself; None where it is written in unequal ones."""
    if problem.default_micro_batch_size is not None:
        return problem.default_micro_batch_size
    written = set(problem.written_micro_batch_sizes or ())
    if not written:
        rule = f"problem {problem.name} has no size of its own"
        raise ConfigError([Fault("micro_batch_size", None, rule, "give micro_batch_size or effective_batch_size")])
    return written.pop() if len(written) == 1 else None
