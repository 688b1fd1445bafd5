"""What one of two processes computes for tests/test_processes.py: `torchrun ... processes_worker.py OUT.json`."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from accum_sweep import launch
from accum_sweep.accumulate import Window, accumulate_gradients, gradient_norm
from accum_sweep.boundary import Boundary
from accum_sweep.ranks import Agreement, OutOfMemoryElsewhere, whole

IGNORED = -100
SAMPLES = 64
# Samples of each micro-batch, those of the first rank and of the second in turns.
SPLITS = {
    "even": [16] * 4,
    "uneven": [30, 2, 1, 31],
    "one rank idle at the end": [20, 20, 24, 0],
    "one by one": [1] * 64,
}


class Tagger(nn.Module):
    """A label for each token of a sequence; a frozen part, and one weight used twice."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, dtype=dtype)
        self.frozen = nn.Linear(6, 6, dtype=dtype).requires_grad_(False)
        self.mix = nn.Linear(6, 6, dtype=dtype)
        self.out = nn.Linear(6, 11, bias=False, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """(sequences, length) to (sequences, length, labels)."""
        return self.out(torch.tanh(self.mix(self.mix(self.frozen(self.embed(tokens))))))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model(batch["tokens"]).flatten(0, 1)
    labels = batch["labels"].flatten()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), (labels != IGNORED).sum()


def data() -> dict[str, Tensor]:
    """64 sequences of 9 tokens, of which 1 to 9 count."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (SAMPLES, 9), generator=generator)
    lengths = torch.randint(1, 10, (SAMPLES, 1), generator=generator)
    labels = torch.where(torch.arange(9) < lengths, tokens.roll(-1, dims=1), IGNORED)
    return {"tokens": tokens, "labels": labels}


def model_of(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    model = Tagger(dtype)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model.mix, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def cut(sizes: Sequence[int], rank: int | None = None) -> list[dict[str, Tensor]]:
    """Micro-batches of these sizes; of one rank, or all."""
    pieces = [
        dict(zip(("tokens", "labels"), pair, strict=True))
        for pair in zip(*(c.split(list(sizes)) for c in data().values()), strict=True)
    ]
    return pieces if rank is None else pieces[rank::2]


def gradient(model: nn.Module) -> Tensor:
    found = [p.grad for p in model.parameters() if p.requires_grad]
    return torch.cat([whole(g).flatten() for g in found if g is not None])


def expected(sizes: Sequence[int], dtype: torch.dtype, normalization: str) -> Tensor:
    """The same gradient in one process, by autograd alone."""
    model = model_of("alone", dtype)
    parameters = [p for p in model.parameters() if p.requires_grad]
    filled = [piece for piece in cut(sizes) if len(piece["tokens"])]
    if normalization == "items":
        filled = [data()]
    total = torch.zeros(1, dtype=dtype)
    for piece in filled:
        loss_sum, items = loss(model, piece)
        total = total + loss_sum / items
    divisor = 1 if normalization == "sum" else len(filled)
    return torch.cat([g.flatten() for g in torch.autograd.grad(total / divisor, parameters)])


def error(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


def gradients(rank: int) -> dict[str, float]:
    found = {}
    for kind in ("ddp", "fsdp"):
        for dtype, precision in ((torch.float64, "fp64"), (torch.float32, "fp32")):
            for name, sizes in SPLITS.items():
                for every in (False, True):
                    model = model_of(kind, dtype)
                    accumulate_gradients(model, cut(sizes, rank), loss, sync_every_micro_batch=every)
                    key = f"{kind} {precision} {name} {'every' if every else 'once'}"
                    found[key] = error(gradient(model), expected(sizes, dtype, "items"))
        for normalization in ("sum", "mean"):
            model = model_of(kind, torch.float64)
            sizes = SPLITS["one rank idle at the end"]
            accumulate_gradients(model, cut(sizes, rank), loss, normalization=normalization)  # type: ignore[arg-type]
            found[f"{kind} {normalization}"] = error(gradient(model), expected(sizes, torch.float64, normalization))
    return found


def by_own_items(rank: int) -> float:
    """The fault: each rank divides by what it holds itself, and DDP averages."""
    model = model_of("ddp", torch.float64)
    pieces = cut(SPLITS["uneven"], rank)
    own = sum(int(loss(model, piece)[1]) for piece in pieces)
    for number, piece in enumerate(pieces, start=1):
        with model.no_sync() if number < len(pieces) else _together():  # type: ignore[operator]
            (loss(model, piece)[0] / own).backward()
    return error(gradient(model), expected(SPLITS["uneven"], torch.float64, "items"))


def _together() -> Any:
    import contextlib

    return contextlib.nullcontext()


def communications(
    rank: int, accumulate: Callable[..., object], before: Callable[[nn.Module], None] | None = None, **how: bool
) -> int:
    """How many times DDP averages a bucket of gradients in a window of four micro-batches a rank."""
    model = model_of("ddp", torch.float64)
    counted = []

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        counted.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / 2)

    model.register_comm_hook(None, hook)  # type: ignore[operator]
    if before is not None:
        before(model)
        counted.clear()
    accumulate(model, cut([8] * 8, rank), loss, **how)
    return len(counted)


def left_window(model: nn.Module) -> None:
    """Leave a window after the forward pass that was to synchronize, as where memory runs out on rank 1."""
    assert isinstance(model, DistributedDataParallel)
    agreement = Agreement(model)
    alone = int(dist.get_rank() == 1)

    def failing(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        found = loss(model, batch)
        if alone:
            raise torch.OutOfMemoryError("out of memory, for a test")
        return found

    try:
        accumulate_gradients(model, cut(SPLITS["uneven"], int(alone))[-1:], failing, agreement=agreement)
    except (torch.OutOfMemoryError, OutOfMemoryElsewhere):
        agreement.leave(model, tell=bool(alone))


def cut_off(model: nn.Module) -> None:
    """The fault: only the exception is taken care of."""
    loss(model, cut(SPLITS["uneven"])[0])


def without_no_sync(model: nn.Module, pieces: Sequence[Any], loss: Any) -> None:
    """The fault: nothing tells DDP to wait."""
    for piece in pieces:
        loss_sum, items = loss(model, piece)
        (loss_sum / items).backward()


def different_numbers(rank: int) -> str:
    try:
        accumulate_gradients(model_of("ddp", torch.float64), cut([8] * 8, rank)[: 3 + rank], loss)
    except ValueError as refused:
        return str(refused)
    return "accepted"


def wrapped_in_part(kind: str, rank: int) -> str:
    """The fault: an inner module is wrapped for several ranks, the model itself is not."""
    model = nn.Sequential(model_of(kind, torch.float64))

    def inner(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return loss(model[0], batch)  # type: ignore[index]

    try:
        accumulate_gradients(model, cut([8] * 8, rank), inner)
    except ValueError as refused:
        return str(refused)
    return "accepted"


def with_accumulator(rank: int) -> str:
    try:
        accumulate_gradients(model_of("ddp", torch.bfloat16), cut([8] * 8, rank), loss, accumulator=torch.float32)
    except ValueError as refused:
        return str(refused)
    return "accepted"


def unused_parameter(rank: int) -> str:
    model = model_of("ddp", torch.float64)

    def half(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        model(batch["tokens"])
        return model.module.embed(batch["tokens"]).sum(), len(batch["tokens"])  # type: ignore[operator, union-attr]

    try:
        accumulate_gradients(model, cut([8] * 8, rank), half)
    except ValueError as refused:
        return str(refused)
    return "accepted"


def boundaries(rank: int) -> dict[str, list[float]]:
    """What each kind of model reports of a window that is clipped, and where its weights are after it."""
    found = {}
    for kind in ("alone", "ddp", "fsdp"):
        model = model_of(kind, torch.float64)
        boundary = Boundary([torch.optim.SGD(model.parameters(), lr=0.5)], clip_norm=0.01)
        window: Window = accumulate_gradients(model, cut(SPLITS["uneven"], None if kind == "alone" else rank), loss)
        norm = float(gradient_norm(model))
        step = boundary.cross(model, window)
        weights = torch.cat([whole(p.detach()).flatten() for p in model.parameters()])
        found[kind] = [norm, step.grad_norm, step.clipped_norm, step.loss, window.total_items, float(weights.norm())]
    return found


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {
        "gradients": gradients(rank),
        "by own items": by_own_items(rank),
        "once": communications(rank, accumulate_gradients),
        "once after one that was left": communications(rank, accumulate_gradients, before=left_window),
        "once after one that was cut off": communications(rank, accumulate_gradients, before=cut_off),
        "every": communications(rank, accumulate_gradients, sync_every_micro_batch=True),
        "without no_sync": communications(rank, without_no_sync),
        "different numbers": different_numbers(rank),
        "in part": [wrapped_in_part(kind, rank) for kind in ("ddp", "fsdp")],
        "accumulator": with_accumulator(rank),
        "unused": unused_parameter(rank),
        "boundaries": boundaries(rank),
    }
    Path(f"{sys.argv[1]}.{rank}").write_text(json.dumps(results))
    dist.destroy_process_group()
    launch.end(0)


if __name__ == "__main__":
    main()
