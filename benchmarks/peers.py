"""Other trainers as referees: the gradient that each one's optimizer really sees, against the full batch's.

    python -m benchmarks.peers [--write]

Every peer is used as its documentation says, on the same model, data, windows, SGD and learning rate, on CPU in
float64, clipping off. The reference is one autograd pass over the window's full batch, at the very weights the peer
had, so that each gradient is judged alone. `pip install -e '.[peers]'` brings the peers; the table says which are not
installed.
"""

import argparse
import contextlib
import io
import logging
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from accum_sweep.accumulate import accumulate_gradients

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], tuple[Tensor, int]]  # summed over the items, and their number

LEARNING_RATE = 0.1
IGNORED = -100  # the label of padding: cross-entropy and every peer leave it out
WRONG = 1e-5  # between what rounding does, also in float32, and what a wrong divisor does


# --- what is trained -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)  # tensors have no plain equality
class Case:
    """One epoch: its micro-batches in order, and what is asked of the trainer."""

    title: str
    model: Callable[[], nn.Module]  # the same weights at every call
    micro_batches: Sequence[Batch] = field(repr=False)
    accum_steps: int  # asked for; the last window may be shorter
    loss: Loss

    @property
    def windows(self) -> list[Sequence[Batch]]:
        """The micro-batches between two optimizer steps."""
        starts = range(0, len(self.micro_batches), self.accum_steps)
        return [self.micro_batches[start : start + self.accum_steps] for start in starts]

    def mean_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """What a user's training step returns: the mean over this micro-batch's items."""
        loss_sum, count = self.loss(model, batch)
        return loss_sum / count


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed over the labels that are not IGNORED. logits: (..., classes); labels: (...)."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=IGNORED)


def items(batch: Batch) -> int:
    """The number of labels the loss asks for: transformers' language models drop each sequence's first one."""
    labels = batch["labels"][:, 1:] if "input_ids" in batch else batch["labels"]
    return int((labels != IGNORED).sum())


def labelled_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """For models that give one row of logits a label."""
    return summed_cross_entropy(model(batch["inputs"]), batch["labels"]), items(batch)


def next_token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """For transformers' language models; they would compute it in float32."""
    logits = model(batch["input_ids"]).logits[:, :-1]
    return summed_cross_entropy(logits, batch["labels"][:, 1:]), items(batch)


def classifier() -> nn.Module:
    """A small perceptron over 8 features and 4 classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


class Decoder(nn.Module):
    """A one-layer causal decoder over 32 tokens, at most 16 of them a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(32, 16), nn.Embedding(16, 16)
        self.layer = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        """(sequences, length) to (sequences, length, 32)."""
        length = ids.shape[1]
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = self.tokens(ids) + self.positions(torch.arange(length))
        logits: Tensor = self.head(self.layer(hidden, src_mask=ahead))
        return logits


def decoder() -> nn.Module:
    """The decoder of this file."""
    torch.manual_seed(0)
    return Decoder().double()


def gpt2() -> nn.Module:
    """A small GPT-2 of transformers, freshly initialized."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config).double()


def llama() -> nn.Module:
    """A small Llama of transformers, freshly initialized."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        max_position_embeddings=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config).double()


def points(*sizes: int) -> list[Batch]:
    """Micro-batches of that many labelled points."""
    random = torch.Generator().manual_seed(1)
    return [
        {
            "inputs": torch.randn(size, 8, generator=random, dtype=torch.float64),
            "labels": torch.randint(4, (size,), generator=random),
        }
        for size in sizes
    ]


def sequences(*lengths: tuple[int, ...]) -> list[Batch]:
    """Micro-batches of token sequences, padded on the right to 12; labels are the inputs, padding IGNORED."""
    random = torch.Generator().manual_seed(2)
    batches = []
    for micro_batch in lengths:
        ids = torch.randint(1, 32, (len(micro_batch), 12), generator=random)
        padding = torch.arange(12) >= torch.tensor(micro_batch)[:, None]
        batches.append({"input_ids": ids.masked_fill(padding, 0), "labels": ids.masked_fill(padding, IGNORED)})
    return batches


def shifted(batch: Batch) -> Batch:
    """The same sequences for a model whose labels are already the next tokens."""
    return {"inputs": batch["input_ids"][:, :-1], "labels": batch["labels"][:, 1:]}


RAGGED = sequences((12, 11), (3, 2), (5, 2))
EVEN = Case("even", classifier, points(*[4] * 12), 4, labelled_loss)
UNEVEN = Case("uneven: 6, 1, 1 samples", classifier, points(6, 1, 1), 3, labelled_loss)
SHORT = Case("short last window: 2 of 4", classifier, points(*[4] * 6), 4, labelled_loss)
TOKENS = Case("ragged tokens", decoder, [shifted(batch) for batch in RAGGED], 3, labelled_loss)
LLAMA = Case("ragged tokens, Llama", llama, RAGGED, 3, next_token_loss)
GPT2 = Case("ragged tokens, GPT-2", gpt2, RAGGED, 3, next_token_loss)
OWN_CASES, TRANSFORMERS_CASES = (EVEN, UNEVEN, SHORT, TOKENS), (LLAMA, GPT2)
CASES = OWN_CASES + TRANSFORMERS_CASES


# --- what the optimizer sees -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """One optimizer step, all parameters in one vector."""

    before: Tensor  # weights
    gradient: Tensor
    after: Tensor  # weights


class WatchedSGD(torch.optim.SGD):
    """Plain SGD that keeps what it saw.

    A step pre-hook would look too early: Lightning runs the last forward and backward inside `step`, as its closure.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=LEARNING_RATE)
        self.seen: list[Seen] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the closure make the gradient, note it, then step."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        parameters = self.param_groups[0]["params"]
        before = parameters_to_vector(parameters).detach().clone()
        gradient = parameters_to_vector([parameter.grad for parameter in parameters]).clone()
        super().step()
        self.seen.append(Seen(before, gradient, parameters_to_vector(parameters).detach().clone()))
        return result


def full_batch_gradient(case: Case, window: Sequence[Batch], weights: Tensor) -> Tensor:
    """What autograd says of the mean loss over all items of the window at once."""
    model = case.model()
    vector_to_parameters(weights, model.parameters())
    batch = {key: torch.cat([micro_batch[key] for micro_batch in window]) for key in window[0]}
    return parameters_to_vector(torch.autograd.grad(case.mean_loss(model, batch), list(model.parameters())))


def worst_error(case: Case, seen: Sequence[Seen]) -> float | None:
    """The largest relative L2 error of a window's gradient; None if there was not one step a window."""
    if len(seen) != len(case.windows):
        return None
    errors = []
    for window, step in zip(case.windows, seen, strict=True):
        expected = full_batch_gradient(case, window, step.before)
        errors.append(float((step.gradient - expected).norm() / expected.norm()))
    return max(errors)


# --- who feeds it ----------------------------------------------------------------------------------------------------


def only(micro_batches: list[Batch]) -> Batch:
    """Collate for loaders whose samples are whole micro-batches."""
    (micro_batch,) = micro_batches
    return micro_batch


def loader(case: Case) -> DataLoader[Batch]:
    """The case's micro-batches as every trainer expects them."""
    return DataLoader(case.micro_batches, batch_size=1, collate_fn=only)  # type: ignore[arg-type]


def this_package(case: Case, _folder: Path) -> list[Seen]:
    """`accumulate_gradients(..., normalization="items")` on each window."""
    model = case.model()
    optimizer = WatchedSGD(model)
    for window in case.windows:
        accumulate_gradients(model, window, case.loss, normalization="items")
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.seen


def plain_loop(case: Case, _folder: Path) -> list[Seen]:
    """Mean loss / accum_steps; a step every accum_steps micro-batches and at the end."""
    model = case.model()
    optimizer = WatchedSGD(model)
    for number, batch in enumerate(case.micro_batches, 1):
        (case.mean_loss(model, batch) / case.accum_steps).backward()
        if number % case.accum_steps == 0 or number == len(case.micro_batches):
            optimizer.step()
            optimizer.zero_grad()
    return optimizer.seen


def accelerate_accumulate(case: Case, _folder: Path) -> list[Seen]:
    """Guide "Performing gradient accumulation", the finished code: `with accelerator.accumulate(model)`, mean loss."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=case.accum_steps, cpu=True)
    model = case.model()
    watched = WatchedSGD(model)
    model, optimizer, batches = accelerator.prepare(model, watched, loader(case))
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(case.mean_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return watched.seen


def accelerate_items(case: Case, _folder: Path) -> list[Seen]:
    """The same guide, "training samples of variable size": summed loss x accum_steps / num_items_in_batch."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=case.accum_steps, cpu=True)
    model = case.model()
    watched = WatchedSGD(model)
    model, optimizer, batches = accelerator.prepare(model, watched, loader(case))
    prepared = iter(batches)
    for size in map(len, case.windows):
        window = [next(prepared) for _ in range(size)]
        num_items_in_batch = sum(items(batch) for batch in window)
        for batch in window:
            loss_sum, _ = case.loss(model, batch)
            accelerator.backward(loss_sum * case.accum_steps * accelerator.num_processes / num_items_in_batch)
        optimizer.step()
        optimizer.zero_grad()
    return watched.seen


def lightning_trainer(case: Case, folder: Path) -> list[Seen]:
    """`Trainer(accumulate_grad_batches=...)`, automatic optimization, mean loss from `training_step`."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = case.model()
            self.watched = WatchedSGD(self.model)

        def training_step(self, batch: Batch) -> Tensor:
            return case.mean_loss(self.model, batch)

        def configure_optimizers(self) -> WatchedSGD:
            return self.watched

    module = Module()
    Trainer(
        accelerator="cpu",
        devices=1,
        precision="64-true",
        max_epochs=1,
        accumulate_grad_batches=case.accum_steps,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, loader(case))
    return module.watched.seen


def lightning_fabric(case: Case, _folder: Path) -> list[Seen]:
    """Guide "Efficient Gradient Accumulation", counting from 1 and dividing by accum_steps as LitGPT does."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
    model = case.model()
    watched = WatchedSGD(model)
    model, optimizer = fabric.setup(model, watched)
    for iteration, batch in enumerate(fabric.setup_dataloaders(loader(case)), 1):
        is_accumulating = iteration % case.accum_steps != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            fabric.backward(case.mean_loss(model, batch) / case.accum_steps)
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()
    return watched.seen


def hf_trainer(case: Case, folder: Path, model: nn.Module, **options: Any) -> list[Seen]:
    """transformers' `Trainer(gradient_accumulation_steps=...)` on this model."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder / "hf"),
        gradient_accumulation_steps=case.accum_steps,
        per_device_train_batch_size=1,  # a sample is a whole micro-batch, see `only`
        train_sampling_strategy="sequential",
        num_train_epochs=1,
        lr_scheduler_type="constant",
        learning_rate=LEARNING_RATE,
        max_grad_norm=0.0,
        remove_unused_columns=False,  # or the labels of `compute_loss_func` would not arrive
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    watched = WatchedSGD(model)
    Trainer(
        model,
        arguments,
        train_dataset=list(case.micro_batches),
        data_collator=only,
        optimizers=(watched, None),
        **options,
    ).train()
    return watched.seen


def hf_mean_loss(case: Case, folder: Path) -> list[Seen]:
    """`Trainer` on a model of one's own that returns its mean loss and takes no `num_items_in_batch`."""

    class ReturnsLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = case.model()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": case.mean_loss(self.model, {"inputs": inputs, "labels": labels})}

    return hf_trainer(case, folder, ReturnsLoss())


def hf_items_loss(case: Case, folder: Path) -> list[Seen]:
    """`Trainer(compute_loss_func=...)` that divides the summed loss by `num_items_in_batch`."""

    def loss(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        return summed_cross_entropy(logits, labels) / num_items_in_batch

    class TakesInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = case.model()

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.model(inputs)
            return logits

    return hf_trainer(case, folder, TakesInputs(), compute_loss_func=loss)


def hf_model(case: Case, folder: Path) -> list[Seen]:
    """`Trainer` on a model of transformers as it is."""
    return hf_trainer(case, folder, case.model())


@dataclass(frozen=True)
class Peer:
    """One row of the table; the first line of `run`'s docstring says which recipe it follows."""

    title: str
    package: str  # that must be installed
    run: Callable[[Case, Path], list[Seen]]
    cases: Sequence[Case] = field(default=CASES, repr=False)  # that it can be run on


THIS = Peer("accum-sweep", "accum_sweep", this_package)
PLAIN = Peer("plain loop", "torch", plain_loop)
ACCELERATE = Peer("Accelerate", "accelerate", accelerate_accumulate)
ACCELERATE_ITEMS = Peer("Accelerate, items", "accelerate", accelerate_items)
LIGHTNING = Peer("Lightning Trainer", "lightning", lightning_trainer)
FABRIC = Peer("Lightning Fabric", "lightning", lightning_fabric)
HF_MEAN = Peer("HF Trainer", "transformers", hf_mean_loss, OWN_CASES)
HF_ITEMS = Peer("HF Trainer, items", "transformers", hf_items_loss, OWN_CASES)
HF_MODEL = Peer("HF Trainer, its models", "transformers", hf_model, TRANSFORMERS_CASES)
PEERS = (THIS, PLAIN, ACCELERATE, ACCELERATE_ITEMS, LIGHTNING, FABRIC, HF_MEAN, HF_ITEMS, HF_MODEL)


# --- the table -------------------------------------------------------------------------------------------------------


def missing(peer: Peer, case: Case) -> list[str]:
    """The packages that are not installed and without which the peer cannot run on the case."""
    needed = {peer.package} | ({"transformers"} if case in TRANSFORMERS_CASES else set())
    return sorted(package for package in needed if not find_spec(package))


def cell(peer: Peer, case: Case, folder: Path) -> str:
    """The error as text, bold where it is not rounding."""
    if case not in peer.cases:
        return "–"
    if missing(peer, case):
        return "not installed"
    error = worst_error(case, peer.run(case, folder))
    if error is None:
        return "**no step**"
    return f"**{error:.2g}**" if error > WRONG else f"{error:.0e}"


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without what trainers print, log and warn of; what counts here is the table."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def processor() -> str:
    """The CPU's name, where the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def report() -> str:
    """Run every peer on every case: the Markdown page."""
    titles = ["trainer", *(case.title for case in CASES), "used as"]
    rows = [titles, ["---"] * len(titles)]
    with quietly(), tempfile.TemporaryDirectory() as folder:
        for peer in PEERS:
            recipe = (peer.run.__doc__ or "").splitlines()[0]
            rows.append([peer.title, *(cell(peer, case, Path(folder)) for case in CASES), recipe])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    packages = ["torch", *sorted({peer.package for peer in PEERS} - {"torch", "accum_sweep"})]
    versions = ", ".join(f"{package} {version(package)}" for package in packages if find_spec(package))
    return PAGE.format(
        wrong=WRONG,
        table=table,
        versions=versions,
        python=platform.python_version(),
        processor=processor(),
        threads=torch.get_num_threads(),
    )


PAGE = """# Other trainers as referees

The gradient that the optimizer really sees, against one autograd pass over the window's full batch in float64: relative
L2 error, the worst window of the epoch. Same model, data, windows, SGD and learning rate; CPU, float64, no clipping.
Bold: above {wrong:.0e}, so not rounding. "no step": a window never reached the optimizer. –: does not apply.

{table}

- **even**: 3 windows of 4 micro-batches of 4 samples. **uneven**: one window. **short**: 6 micro-batches, 4 a window.
  **ragged tokens**: one window of 3 micro-batches of 2 padded sequences each; a one-layer decoder, then small models of
  transformers.
- Errors near 1e-8 are float32: Fabric hands outputs back in it, transformers computes its losses in it, and parts of
  Llama.

What stands behind the bold cells, as of accelerate 1.15, lightning 2.6 and transformers 5.24:

- *A mean of means* weighs a micro-batch of 1 sample as much as one of 6; it is right where micro-batches are equal.
- *A nominal divisor*: a short window divided by the number of micro-batches asked for is a short step (Lightning issue
  19987). HF Trainer divides by the real number. Fabric's guide leaves the rest of an epoch to its user.
- *Items miscounted*: HF Trainer leaves out each sequence's first label, which the loss never asks for, where the
  model's `loss_type` says so (transformers PR 46204). `GPT2LMHeadModel` has none: that label is counted, and the step
  is too small.

{versions}; Python {python}; {processor}, {threads} thread(s).
`python -m benchmarks.peers --write`
"""


def main(words: Sequence[str] | None = None) -> None:
    """Print the page; with --write, keep it beside this file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="also write the page to benchmarks/peers.md")
    arguments = parser.parse_args(words)
    page = report()
    print(page, end="")
    if arguments.write:
        Path(__file__).with_suffix(".md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
