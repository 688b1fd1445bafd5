"""Which runs of a sweep cannot fit where another has run out of memory."""

from typing import Any

from accum_sweep.config import Config

# All that may differ, beside the sizes: none of it changes the shape of a tensor.
NO_MATTER = {"lr", "seed", "accum_steps", "micro_batch_size", "effective_batch_size"}


def needs_as_much(config: Config, failed: Config) -> bool:
    """Tell whether `config` must need at least as much memory as `failed`; False where that is not certain.

    It must where all settings that matter are equal and

    - its micro-batches are at least as large: the first, and where `failed` has several, so that a later one meets the
      gradients of those before it, the second too;
    - its windows have at least as many samples: their indices, losses and the check's full batch grow with them;
    - the data gives it two full windows, so that the second meets the optimizer's state.

    One micro-batch of twice the size is not comparable with two: it meets no gradients.
    """
    if not (_sizes_known(config) and _sizes_known(failed)) or _others(config) != _others(failed):
        return False
    sizes, failed_sizes = next(config.plan(0)), next(failed.plan(0))
    if len(sizes) < min(2, len(failed_sizes)) or sum(sizes) < sum(failed_sizes):
        return False
    if config.epochs is not None and 2 * sum(sizes) > config.problem.train_samples:
        return False
    later = failed_sizes[1:]
    return sizes[0] >= max(failed_sizes) and (not later or sizes[1] >= max(later))


def _sizes_known(config: Config) -> bool:
    """Tell whether all windows are alike, of one process: what several need is not added up here."""
    return None not in (config.accum_steps, config.micro_batch_size) and config.processes == 1 and not config.automatic


def _others(config: Config) -> dict[str, Any]:
    """Return the settings that must be equal. A problem of the user's own may draw its sizes by the seed."""
    own = not type(config.problem).__module__.startswith("accum_sweep.problems.") or config.problem.name == "custom"
    return config.model_dump(exclude=NO_MATTER - {"seed"} if own else NO_MATTER)
