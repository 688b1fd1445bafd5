"""Who holds memory: every block of it followed from birth to death, with what it is for.

torch only. Works on real tensors and on fake ones, which have a size and no content: what is measured and what is
predicted is booked by the same hand. Not seen are buffers that a kernel takes and gives back inside one operation.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

prim = torch.ops.prim
Kind = Literal["parameters", "gradients", "optimizer", "activations", "data", "temporaries"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "activations", "data", "temporaries")
Phase = Literal["start", "data", "forward", "backward", "step"]
Event = tuple[int, int]  # number of a block, its bytes when it comes, 0 when it goes
# What a block is that is still there when the phase in which it was made ends.
SURVIVORS: dict[Phase, Kind] = {
    "start": "parameters",
    "data": "data",
    "forward": "activations",
    "backward": "gradients",
    "step": "optimizer",
}


@dataclass
class Block:
    """A piece of memory that a tensor sits on."""

    number: int
    size: int  # bytes
    phase: Phase
    is_scalar: bool
    kind: Kind = "temporaries"
    alive: bool = True


@dataclass(frozen=True)
class Statement:
    """The peak, in bytes, above what was there before: when it is, and who holds it."""

    peak_bytes: int
    phase: Phase
    parts: dict[Kind, int]  # their sum is the peak


@dataclass(frozen=True)
class Trace:
    """Everything that came and went, in order, and of each block what it was for and when it was made."""

    events: list[Event]
    kinds: list[Kind]
    phases: list[Phase]

    def statement(self) -> Statement:
        """Find the peak."""
        live: dict[int, int] = {}
        now = peak = 0
        at = 0
        phase: Phase = "start"
        for number, (block, size) in enumerate(self.events, start=1):
            if not size:
                now -= live.pop(block)
                continue
            live[block] = size
            now += size
            if now > peak:
                peak, at, phase = now, number, self.phases[block]
        parts = dict.fromkeys(KINDS, 0)
        gone = {block for block, size in self.events[:at] if not size}
        for block, size in self.events[:at]:
            if block not in gone:
                parts[self.kinds[block]] += size
        return Statement(peak, phase, parts)


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Books blocks while it is entered, backward passes included.

    What was there before is not booked. The phases tell what survives them: say when each begins. `own_bytes`, called
    with an operation and its arguments, says how much a kernel takes for itself and gives back; `perform` does an
    operation, where it is not to be done for real.
    """

    def __init__(
        self, own_bytes: Callable[[Any, Any, Any], int] | None = None, perform: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own_bytes, self._perform = own_bytes, perform
        self.computes = perform is None
        self._events: list[Event] = []
        self._blocks: list[Block] = []
        self._known: dict[int, tuple[weakref.ref[Any], Block | None]] = {}  # by address of a storage's C++ object
        self._young: list[Block] = []  # made in this phase
        self._phase: Phase = "start"

    def begin(self, phase: Phase) -> None:
        """End the phase before, and begin this one."""
        survivors = SURVIVORS[self._phase]
        for block in self._young:
            # Single numbers that live on are losses.
            if block.alive and block.kind == "temporaries" and not (block.is_scalar and survivors == "gradients"):
                block.kind = survivors
        self._young.clear()
        self._phase = phase

    def hold(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Book tensors that were there before."""
        tensors = list(tensors)
        for tensor in tensors:
            self._meet(tensor, new=True)
        self.mark(tensors, kind)

    def mark(self, tensors: Iterable[Tensor | None], kind: Kind) -> None:
        """Say what these tensors are for, those that are booked."""
        for tensor in tensors:
            found = None if tensor is None else self._known.get(tensor.untyped_storage()._cdata)
            if found is not None and found[1] is not None:
                found[1].kind = kind

    def trace(self) -> Trace:
        """Return all that was booked; what goes between two that come, in the order of its numbers.

        autocast's cache lets go in the order of addresses, another in each pass.
        """
        events: list[Event] = []
        for comes, group in itertools.groupby(self._events, key=lambda event: bool(event[1])):
            following = list(group)
            events += following if comes else sorted(following)
        kinds, phases = [block.kind for block in self._blocks], [block.phase for block in self._blocks]
        return Trace(events, kinds, phases)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the operation happen, and book what it has made."""
        kwargs = kwargs or {}
        if func is prim.device.default:  # asked often, and makes nothing
            return func(*args)
        for tensor in _tensors((*args, *kwargs.values())):
            self._meet(tensor, new=False)
        made = func(*args, **kwargs) if self._perform is None else self._perform(func, args, kwargs)
        for tensor in _tensors((made,)):
            self._meet(tensor, new=True)
        if self._own_bytes is not None and (own := self._own_bytes(func, args, kwargs)):
            self._forget(self._book(own, is_scalar=False))
        return made

    def _meet(self, tensor: Tensor, new: bool) -> None:
        """Book the storage of a tensor where it is not known yet; one that is no work of ours has no block."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        block = self._book(storage.nbytes(), tensor.numel() == 1) if new else None

        def gone(_: object) -> None:
            del self._known[key]
            if block is not None:
                self._forget(block)

        self._known[key] = weakref.ref(storage, gone), block

    def _book(self, size: int, is_scalar: bool) -> Block:
        block = Block(len(self._blocks), size, self._phase, is_scalar)
        self._blocks.append(block)
        self._young.append(block)
        if size:
            self._events.append((block.number, size))
        return block

    def _forget(self, block: Block) -> None:
        block.alive = False
        if block.size:
            self._events.append((block.number, 0))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
