"""A window whose memory runs out is repeated in smaller micro-batches: same samples, same gradient.

Several processes under DistributedDataParallel repeat it together, be it that memory ran out in one of them only. Not
where it runs out in the backward pass in which they synchronize, and not under FSDP: there the others wait for what
will not come, and the run ends as out of memory, on all.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from accum_sweep.accumulate import Window
from accum_sweep.batches import MicroBatches
from accum_sweep.full_batch import random_state, set_random_state
from accum_sweep.memory import out_of_memory, release
from accum_sweep.ranks import Agreement, OutOfMemoryElsewhere
from accum_sweep.windows import cut

log = logging.getLogger(__name__)


@dataclass
class Repeating:
    """Accumulates windows as `accumulate` does; later windows keep the smaller size: give them to `fit`.

    Where it repeats, gradients are dropped, and buffers and random state are those of the window's beginning, so that
    nothing is drawn, or counted, twice. `again(model, sizes)` is called before that. `pace` says that BatchNorm's
    momentum stands for the number of micro-batches in a window, and follows it. On several ranks `agreement` is the one
    that `accumulate` asks.
    """

    accumulate: Callable[[nn.Module, MicroBatches], Window]
    again: Callable[[nn.Module, tuple[int, ...]], None]
    device: torch.device
    pace: bool = False
    agreement: Agreement | None = None
    size: int | None = None  # the most samples a micro-batch may hold from now on; None: as many as planned
    notes: list[str] = field(default_factory=list)  # what happened, for the record
    _windows: int = 0

    def fit(self, window: list[Tensor]) -> list[Tensor]:
        """Return a window in micro-batches that are not too large."""
        return window if self.size is None else cut(window, self.size)

    def __call__(self, model: nn.Module, micro_batches: MicroBatches) -> Window:
        """Accumulate one window. Raises what says that memory ran out where single samples are too much."""
        self._windows += 1
        random, buffers = random_state(), [buffer.detach().clone() for buffer in model.buffers()]
        while True:
            if self.agreement is not None:
                self.agreement.begin()
            try:
                return self.accumulate(model, micro_batches)
            except Exception as error:
                size = max(map(len, micro_batches.window))
                if not out_of_memory(error):
                    raise
                here = not isinstance(error, OutOfMemoryElsewhere)
                if size == 1 or (here and self.agreement is not None and self.agreement.late):
                    raise
            # Outside of the except block: until that is left, its traceback holds the tensors.
            for parameter in model.parameters():
                parameter.grad = None
            release(self.device)
            if self.agreement is not None:
                self.agreement.leave(model, tell=here)
            self.size = math.ceil(size / 2)
            before = len(micro_batches)
            micro_batches.recut(self.size)
            with torch.no_grad():
                for buffer, value in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(value)
            if self.pace:
                _keep_pace(model, before / len(micro_batches))
            set_random_state(random)
            note = f"memory ran out in step {self._windows} at micro-batches of {size}; repeated with {self.size}"
            log.warning("%s", note)
            self.notes.append(note)
            self.again(model, tuple(map(len, micro_batches.window)))


def _keep_pace(model: nn.Module, ratio: float) -> None:
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.momentum is not None:
            module.momentum = 1 - (1 - module.momentum) ** ratio
