"""Adapters from mean losses: the right count makes the window's gradient the full batch's, and a wrong one does not."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accum_sweep.accumulate import Loss, accumulate_gradients
from accum_sweep.losses import IGNORED, causal_tokens, from_hugging_face, from_mean, label_tokens
from test_problems import HF

Tagged = Mapping[str, Tensor]  # x (rows, length, features) and labels (rows, length)

LENGTHS = (1, 7, 2, 5, 3, 6, 4, 2)  # labels in each row, the others are ignored
LONGEST = max(LENGTHS)
CLASSES = 11


def ragged(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(len(lengths), LONGEST, 5, dtype=torch.float64, generator=generator)
    tokens = torch.randint(1, CLASSES, (len(lengths), LONGEST), generator=generator)
    there = torch.arange(LONGEST) < torch.tensor(lengths)[:, None]
    return {
        "x": x,
        "input_ids": tokens.where(there, 0),
        "attention_mask": there.long(),
        "labels": tokens.where(there, IGNORED),
    }


def split(batch: Tagged, *sizes: int) -> list[dict[str, Tensor]]:
    columns = {name: column.split(list(sizes)) for name, column in batch.items()}
    return [{name: parts[number] for name, parts in columns.items()} for number in range(len(sizes))]


def only(batch: Tagged, *names: str) -> dict[str, Tensor]:
    return {name: batch[name] for name in names}


def tagger() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, CLASSES).double()


def mean_loss(model: nn.Module, batch: Tagged) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def error(model: nn.Module, window: list[Any], loss: Loss, expected: Tensor) -> float:
    """The relative error of what the window leaves against the gradient of one mean over all."""
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(expected, parameters, allow_unused=True)
    model.zero_grad()
    accumulate_gradients(model, window, loss)
    difference = norm = 0.0
    for parameter, entry in zip(parameters, gradient, strict=True):
        if entry is not None:
            assert parameter.grad is not None
            difference += float((parameter.grad - entry).square().sum())
            norm += float(entry.square().sum())
    return (difference / norm) ** 0.5


SPLITS = [(8,), (4, 4), (1, 2, 5), (1,) * 8]


@pytest.mark.parametrize("sizes", SPLITS)
def test_a_mean_loss_with_its_count_gives_the_full_batch(sizes: tuple[int, ...]) -> None:
    model, batch = tagger(), ragged()
    window = split(batch, *sizes)
    assert error(model, window, from_mean(mean_loss, label_tokens), mean_loss(model, batch)) < 1e-14


@pytest.mark.parametrize("count", [lambda batch: len(batch["labels"]), causal_tokens, lambda _: 1])
def test_a_wrong_count_does_not(count: Callable[[Any], Any]) -> None:
    """By rows, as if it predicted the next, and a mean of means."""
    model, batch = tagger(), ragged()
    window = split(batch, 4, 2, 2)
    assert error(model, window, from_mean(mean_loss, count), mean_loss(model, batch)) > 1e-3


def test_the_sum_and_the_number_of_items_are_those_of_the_batch() -> None:
    model, batch = tagger(), ragged()
    found, items = from_mean(mean_loss, label_tokens)(model, batch)
    summed = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    assert found.item() == pytest.approx(summed.item(), rel=1e-14)
    assert items == sum(LENGTHS)
    assert type(items) is int


def test_a_micro_batch_without_items_adds_nothing() -> None:
    model, batch = tagger(), ragged((3, 0, 0, 5, 0, 1))
    loss = from_mean(mean_loss, label_tokens)
    window = split(batch, 1, 2, 3)
    assert mean_loss(model, window[1]).isnan(), "which its mean would poison"
    assert error(model, window, loss, mean_loss(model, batch)) < 1e-14
    counted = accumulate_after(model, window, loss)
    assert counted == (3, 0, 6)


def accumulate_after(model: nn.Module, window: list[Any], loss: Loss) -> tuple[int, ...]:
    model.zero_grad()
    return accumulate_gradients(model, window, loss).items


def squared(model: nn.Module, batch: Tagged) -> Tensor:
    return F.mse_loss(model(batch["x"][:, 0]), batch["x"].new_zeros(len(batch["x"]), CLASSES))


def masked(model: nn.Module, batch: Tagged) -> Tensor:
    there = (batch["labels"] != IGNORED).to(batch["x"].dtype)
    return (model(batch["x"]).square().sum(dim=2) * there).sum() / there.sum()


@pytest.mark.parametrize(
    ("mean", "rows"),
    [(mean_loss, 0), (mean_loss, 3), (squared, 0), (masked, 0)],
)
def test_backward_on_no_items_reaches_every_weight_and_adds_zero(
    mean: Callable[[nn.Module, Any], Tensor], rows: int
) -> None:
    """On several ranks it is run, for the others' sake."""
    model, batch = tagger(), ragged((0,) * rows) if rows else only(ragged(), "x", "labels")
    if not rows:
        batch = {name: column[:0] for name, column in batch.items()}
    assert mean(model, batch).isnan()
    count = label_tokens if mean is not squared else lambda batch: len(batch["x"])
    loss_sum, items = from_mean(mean, count)(model, batch)
    loss_sum.backward()
    assert (loss_sum.item(), items) == (0, 0)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_a_mean_that_divides_by_nothing_itself_would_be_seen() -> None:
    model = tagger()
    from_mean(masked, label_tokens)(model, ragged((0, 0, 0)))[0].backward()
    assert all(parameter.grad is not None and parameter.grad.isnan().all() for parameter in model.parameters())
    # Alone, where no backward is run on it, it adds nothing either.
    batch = ragged((3, 0, 0, 5))
    window = split(batch, 1, 2, 1)
    assert error(model, window, from_mean(masked, label_tokens), masked(model, batch)) < 1e-14


# Counts


def test_tokens_are_counted() -> None:
    batch = ragged()
    assert int(label_tokens(batch)) == sum(LENGTHS)
    assert int(causal_tokens(batch)) == sum(length - 1 for length in LENGTHS)
    x = IGNORED
    odd = {"labels": torch.tensor([[x, x, 4, x], [5, x, x, 6], [x, x, x, x], [7, 8, 9, 1]])}
    assert (int(label_tokens(odd)), int(causal_tokens(odd))) == (7, 5), "the first of a row has nothing before it"
    none = {"labels": torch.empty(0, 4, dtype=torch.int64)}
    assert (int(label_tokens(none)), int(causal_tokens(none))) == (0, 0)
    assert int(label_tokens({"labels": torch.tensor([1, x, 0])})) == 2, "of any shape"


# Hugging Face

SMALL = {
    "vocab_size": CLASSES,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "pad_token_id": 0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def hugging_face(kind: str, model_type: str, **settings: Any) -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SMALL, **settings)
    model: nn.Module = getattr(transformers, kind).from_config(config)
    return model.train()


def llama() -> nn.Module:
    return hugging_face("AutoModelForCausalLM", "llama", num_key_value_heads=2, use_cache=False)


TOKENS = ("input_ids", "attention_mask", "labels")


@HF
@pytest.mark.parametrize("sizes", SPLITS)
def test_a_causal_model_gives_the_full_batch(sizes: tuple[int, ...]) -> None:
    model, batch = llama(), only(ragged(), *TOKENS)
    assert error(model, split(batch, *sizes), from_hugging_face(), model(**batch).loss) < 1e-6


@HF
def test_a_causal_model_counted_by_labels_does_not() -> None:
    model, batch = llama(), only(ragged(), *TOKENS)
    window = split(batch, 4, 2, 2)
    assert error(model, window, from_hugging_face(label_tokens), model(**batch).loss) > 1e-3
    assert error(model, window, from_hugging_face(causal_tokens), model(**batch).loss) < 1e-6


@HF
def test_rows_that_predict_nothing_add_nothing() -> None:
    """A row of one token has a label, and nothing to predict it from."""
    model, batch = llama(), only(ragged((1, 1, 4, 7, 1)), *TOKENS)
    window = split(batch, 2, 2, 1)
    assert error(model, window, from_hugging_face(), model(**batch).loss) < 1e-6
    assert accumulate_after(model, window, from_hugging_face()) == (0, 9, 0)
    assert accumulate_after(model, window, from_hugging_face(label_tokens)) == (2, 11, 1), "as labels say"


@HF
def test_a_masked_model_counts_its_labels() -> None:
    model, batch = hugging_face("AutoModelForMaskedLM", "bert", **NO_DROPOUT), only(ragged(), *TOKENS)
    window = split(batch, 4, 2, 2)
    assert error(model, window, from_hugging_face(label_tokens), model(**batch).loss) < 1e-6
    assert error(model, window, from_hugging_face(), model(**batch).loss) > 1e-3


@HF
def test_a_classifier_counts_its_rows() -> None:
    model = hugging_face("AutoModelForSequenceClassification", "bert", num_labels=3, **NO_DROPOUT)
    batch = only(ragged(), "input_ids", "attention_mask") | {"labels": torch.arange(len(LENGTHS)) % 3}
    window = split(batch, 5, 2, 1)
    assert error(model, window, from_hugging_face(lambda batch: len(batch["labels"])), model(**batch).loss) < 1e-6
    assert error(model, window, from_hugging_face(lambda _: 1), model(**batch).loss) > 1e-3
