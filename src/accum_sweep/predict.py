"""The peak of a run's memory, predicted: the same short pass, on tensors that have a form and no content.

Nothing of it is computed and, beyond the data set, nothing allocated, so that a model may be larger than this machine;
for the CPU small operations are run once, to learn what their kernels take (`kernels.py`). For a CUDA device the blocks
that come and go are replayed through a model of its caching allocator.
"""

import copy
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from accum_sweep import precision
from accum_sweep.allocator import replay
from accum_sweep.config import Config
from accum_sweep.kernels import own_bytes
from accum_sweep.ledger import Kind, Ledger, Phase, Trace
from accum_sweep.problems import Problem
from accum_sweep.short_pass import ShortWindows, can_be_followed, short_pass, short_windows

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
aten = torch.ops.aten
# Norms, and the argument whose type their statistics have; without content torch gives them the values' type.
NORMS = {
    aten.native_group_norm.default: 1,
    aten.native_group_norm_backward.default: 3,
    aten.native_batch_norm.default: 1,
    aten.native_layer_norm.default: 2,
}
# Losses whose sum or mean, one number, keeps the buffer that held every sample's.
ON_WHOLE_BUFFER = (aten.mse_loss.default, aten.smooth_l1_loss.default)


@dataclass(frozen=True)
class Prediction:
    """Peak bytes above what was in use before, when it is, and who holds them."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int | None  # by CUDA's caching allocator
    phase: Phase
    parts: dict[Kind, int]

    @property
    def needed_bytes(self) -> int:
        """What the device must hold: what its allocator reserves, where it has one that does."""
        return self.peak_allocated_bytes if self.peak_reserved_bytes is None else self.peak_reserved_bytes


def predict(config: Config, problem: Problem, device_type: str) -> Prediction:
    """Predict the peak that `short_pass.measure` would find for `config` on a device of this type.

    `problem` may be `outline(config)` or a real one. Raises what torch raises where an operation cannot go without
    content, such as one whose output is as large as there are entries above 0.
    """
    return read(trace(config, problem, device_type), device_type)


def trace(config: Config, problem: Problem, device_type: str) -> Trace:
    """Return what comes and goes in the short pass."""
    short, needed = short_windows(config, problem)
    with fakes() as mode:
        problem = _without_content(problem, mode)
        windows: ShortWindows = [list(map(mode.from_tensor, window)) for window in short], needed
        ledger = Ledger(own_bytes if device_type == "cpu" else None, _perform)
        with ledger, _random_state_followed() if device_type == "cpu" else nullcontext():
            ledger.hold([*problem.model.parameters(), *problem.model.buffers()], "parameters")
            short_pass(_as_on(config, device_type), problem, windows, problem.model, CPU, ledger)
    return ledger.trace()


def read(trace: Trace, device_type: str) -> Prediction:
    """Return the peak that a trace has on a device of this type."""
    found = trace.statement()
    if device_type != "cuda":
        return Prediction(found.peak_bytes, None, found.phase, found.parts)
    replayed = replay(trace.events)
    # What the allocator's rounding adds is nobody's.
    rounding = replayed.allocated_bytes - found.peak_bytes
    parts = found.parts | {"temporaries": found.parts["temporaries"] + rounding}
    return Prediction(replayed.allocated_bytes, replayed.reserved_bytes, found.phase, parts)


def try_to_predict(config: Config, problem: Problem, device: torch.device) -> Prediction | None:
    """Predict, or say in the log why that cannot be."""
    if not can_be_followed(config):
        return None
    try:
        return predict(config, problem, device.type)
    except Exception as error:  # of a problem's own code, which may not be made for tensors without content
        log.info("the peak of memory cannot be predicted (%s)", str(error).partition("\n")[0])
        return None


def outline(config: Config) -> Problem:
    """Build the problem without content: of any size, in hardly any memory.

    What it caches on the way has no content either: use it in a process that trains nothing.
    """
    with fakes(), _Performing():  # type: ignore[no-untyped-call]
        return config.problem.build(precision.weights_dtype(config.precision))


def fakes() -> FakeTensorMode:
    """Return the context in which tensors have no content."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # It would remember each tensor by a weak reference, and nn.Module.to() refuses tensors that have one.
    mode.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
    return mode


@contextmanager
def _random_state_followed() -> Iterator[None]:
    """Let what checkpointing keeps, to draw the same random numbers again, be a tensor that a ledger sees."""
    before = torch.get_rng_state, torch.set_rng_state
    size = torch.get_rng_state().numel()
    torch.get_rng_state = lambda: torch.empty(size, dtype=torch.uint8)
    torch.set_rng_state = lambda new_state: None  # noqa: ARG005 - torch's name for it
    try:
        yield
    finally:
        torch.get_rng_state, torch.set_rng_state = before


class _Performing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The context in which operations are done as `_perform` does them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _perform(func, args, kwargs or {})


def _perform(func: Any, args: Any, kwargs: Any) -> Any:
    """Do an operation on tensors without content.

    What they hold, where a program asks for it: numbers are 1, nothing is true, and all are equal.
    """
    if func in (aten.allclose.default, aten.equal.default):
        return True
    if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
        dtype = args[0].dtype
        return 1.0 if dtype.is_floating_point else int(dtype is not torch.bool)
    made = func(*args, **kwargs)
    if func in NORMS and (typical := args[NORMS[func]]) is not None:
        values, *statistics = made
        return values.to(args[0].dtype), *(tensor.to(typical.dtype) for tensor in statistics)
    if func in ON_WHOLE_BUFFER and not made.dim():
        return args[0].new_empty(args[0].shape).as_strided((), ())
    return made


def _as_on(config: Config, device_type: str) -> Config:
    """Return the configuration that does on the CPU what `config` does on a device of this type."""
    settings = config.optimizer
    if device_type == "cuda" and settings.get("foreach") is None and not settings.get("fused"):
        cls = getattr(torch.optim, settings["name"])
        if "foreach" in inspect.signature(cls).parameters:  # which it takes there of its own
            settings = {**settings, "foreach": True}
    return config.model_copy(update={"optimizer": settings, "compile": False})


def _without_content(problem: Problem, mode: FakeTensorMode) -> Problem:
    """Return a problem of the same form."""
    model, train = problem.model, problem.train
    fake: dict[int, Any] = {}  # what copy.deepcopy takes for copied already
    for parameter in model.parameters():
        fake[id(parameter)] = nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
    for buffer in model.buffers():
        fake[id(buffer)] = mode.from_tensor(buffer)
    columns = (
        {name: mode.from_tensor(column) for name, column in train.items()}
        if isinstance(train, Mapping)
        else tuple(map(mode.from_tensor, train))
    )
    return replace(problem, model=copy.deepcopy(model, fake), train=columns)
