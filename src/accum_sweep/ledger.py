"""Who holds memory: every block of it followed from birth to death, with what it is for.

torch only. Works on real tensors and on fake ones, which have a size and no content: what is measured and what is
predicted is booked by the same hand. Not seen are buffers that a kernel takes and gives back inside one operation.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

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


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Books blocks while it is entered, backward passes included.

    What was there before is not booked. The phases tell what survives them: say when each begins. `own_bytes`, called
    with an operation and its arguments, says how much a kernel takes for itself and gives back.
    """

    def __init__(self, own_bytes: Callable[[Any, Any, Any], int] | None = None, computes: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computes = computes  # False: the tensors have no content
        self._own_bytes = own_bytes
        self.events: list[Event] = []
        self._blocks: list[Block] = []
        self._known: dict[int, tuple[weakref.ref[Any], Block | None]] = {}  # by address of a storage's C++ object
        self._young: list[Block] = []  # made in this phase
        self._phase: Phase = "start"
        self._now = self._peak = 0
        self._peak_at = 0  # number of events so far
        self._peak_phase: Phase = "start"

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

    def statement(self) -> Statement:
        """Return what is known of the peak."""
        live: dict[int, int] = {}
        for block, size in self.events[: self._peak_at]:
            if size:
                live[block] = size
            else:
                del live[block]
        parts = dict.fromkeys(KINDS, 0)
        for number, size in live.items():
            parts[self._blocks[number].kind] += size
        return Statement(self._peak, self._peak_phase, parts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the operation happen, and book what it has made."""
        kwargs = kwargs or {}
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._meet(tensor, new=False)
        made = func(*args, **kwargs)
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor):
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
        self._now += size
        if size:
            self.events.append((block.number, size))
        if self._now > self._peak:
            self._peak, self._peak_at, self._peak_phase = self._now, len(self.events), self._phase
        return block

    def _forget(self, block: Block) -> None:
        block.alive = False
        self._now -= block.size
        if block.size:
            self.events.append((block.number, 0))
