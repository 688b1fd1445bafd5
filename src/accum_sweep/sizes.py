"""The sizes and the length of a run, from those that are given. What nobody gives comes from the problem."""

from accum_sweep.errors import ConfigError, Fault
from accum_sweep.problems import ProblemParams

SIZES = ("accum_steps", "micro_batch_size", "effective_batch_size")
Sizes = tuple[int, int | None, int | None]  # in that order


def derive_sizes(accum: int | None, micro: int | None, effective: int | None, problem: ProblemParams) -> Sizes:
    """Return all three sizes. The last two are None where the problem's unequal mini-batches are taken as written.

    Raises ConfigError where the sizes contradict each other, do not divide, or are larger than the data.
    """
    given_micro = micro
    if effective is None:
        accum = accum or _own_accum_steps(problem)
        micro = micro or _own_size(problem)
        effective = accum * micro if micro is not None else None
    elif micro is None:
        accum = accum or _own_accum_steps(problem)
        micro = _quotient(effective, "accum_steps", accum)
    elif accum is None:
        accum = _quotient(effective, "micro_batch_size", micro)
    elif accum * micro != effective:
        given = f"{accum} with micro_batch_size={micro} and effective_batch_size={effective}"
        rule = f"{accum} x {micro} is {accum * micro}, not {effective}"
        raise ConfigError([Fault("accum_steps", given, rule, "give any two of the three, the third follows")])
    if micro is not None and micro > problem.train_samples:
        rule = f"is more than the {problem.train_samples} training samples of problem {problem.name}"
        if given_micro is not None:
            raise ConfigError([Fault("micro_batch_size", micro, rule, "lower it")])
        derived = f"{micro} (from effective_batch_size={effective} and accum_steps={accum})"
        remedy = "raise accum_steps or lower effective_batch_size"
        raise ConfigError([Fault("micro_batch_size", derived, rule, remedy)])
    return accum, micro, effective


def derive_length(steps: int | None, epochs: int | None, problem: ProblemParams) -> tuple[int | None, int | None]:
    """Return steps and epochs, one of them None; raise ConfigError where both are given."""
    if steps is not None and epochs is not None:
        rule = "steps and epochs exclude each other"
        raise ConfigError([Fault("steps", f"{steps} with epochs={epochs}", rule, "give one of them")])
    if steps is None and epochs is None:
        return (None, problem.default_epochs) if problem.default_epochs else (problem.default_steps or 1, None)
    return steps, epochs


def check_last_window(last_window: str, epochs: int | None, sizes: Sizes, problem: ProblemParams) -> None:
    """Raise ConfigError where dropping short windows would leave no step at all."""
    accum, _, effective = sizes
    written = problem.written_micro_batch_sizes or ()
    short = effective > problem.train_samples if effective is not None else accum > len(written)
    if epochs is not None and last_window == "drop" and short:
        rule = f"an epoch of {problem.train_samples} samples holds no full window, so there would be no step"
        raise ConfigError([Fault("last_window", "drop", rule, "use last_window=flush, or a smaller window")])


def _own_accum_steps(problem: ProblemParams) -> int:
    return problem.default_accum_steps or len(problem.written_micro_batch_sizes or ()) or 1


def _own_size(problem: ProblemParams) -> int | None:
    """Return the micro-batch size a problem has of itself; None where it is written in unequal ones."""
    if problem.default_micro_batch_size is not None:
        return problem.default_micro_batch_size
    written = set(problem.written_micro_batch_sizes or ())
    if not written:
        rule = f"problem {problem.name} has no size of its own"
        raise ConfigError([Fault("micro_batch_size", None, rule, "give micro_batch_size or effective_batch_size")])
    return written.pop() if len(written) == 1 else None


def _quotient(effective: int, key: str, divisor: int) -> int:
    quotient, rest = divmod(effective, divisor)
    if rest:
        rule = f"effective_batch_size must be a multiple of {key}"
        remedy = f"the nearest that is one is {max(1, round(effective / divisor)) * divisor}"
        raise ConfigError([Fault("effective_batch_size", f"{effective} with {key}={divisor}", rule, remedy)])
    return quotient
