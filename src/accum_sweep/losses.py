"""Adapters: from the losses people have to the one the engine takes, (model, batch) -> (sum over items, their number).

torch only. The right number of items is what makes the difference between the full batch's gradient and a mean of
means; a loss that averages over tokens needs the count of the very tokens it averages over.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from accum_sweep.accumulate import Loss

IGNORED = -100  # the label that PyTorch's and Hugging Face's cross-entropy leave out


def from_mean(mean_loss: Callable[[nn.Module, Any], Tensor], count: Callable[[Any], int | Tensor]) -> Loss:
    """Adapt a loss that averages over items, such as `F.cross_entropy(model(x), y)`.

    `count(batch)` says over how many. A batch without items adds nothing, whatever its mean (0/0) would be; on several
    ranks, where its backward is run all the same, that must not itself divide by a count of 0 (torch's losses do not).
    """

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        items = int(count(batch))
        mean = mean_loss(model, batch)
        return (mean * items if items else mean.nan_to_num(0.0) * 0), items

    return loss


def from_hugging_face(count: Callable[[Any], int | Tensor] | None = None) -> Loss:
    """Adapt a Hugging Face model: called as `model(**batch)`, it returns an output with its mean `.loss`.

    `count` is `causal_tokens` unless given; take `label_tokens` for masked and sequence-to-sequence models, and
    `lambda batch: len(batch["labels"])` for classifiers.
    """
    return from_mean(lambda model, batch: model(**batch).loss, count or causal_tokens)


def causal_tokens(batch: Any) -> Tensor:
    """Count what a causal language model predicts: labels but each row's first, which nothing comes before.

    `batch["labels"]` is (sequences, length). Models average over exactly these.
    """
    labels: Tensor = batch["labels"]
    return (labels[:, 1:] != IGNORED).sum()


def label_tokens(batch: Any) -> Tensor:
    """Count the labels that are not ignored; `batch["labels"]` has any shape."""
    labels: Tensor = batch["labels"]
    return (labels != IGNORED).sum()
