"""The problems on text: the corpus, and models of Hugging Face transformers, which never ask the network."""

import json
import math
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import accum_sweep
from accum_sweep.errors import UserError
from accum_sweep.problems import Problem, causal_lm, char_gpt, corpus
from test_problems import CPU, HF, SPLITS, batch, build, difference, gradient

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_sentences_are_real_ragged_and_each_there_once() -> None:
    found = corpus.sentences()
    lengths = torch.tensor([len(text) for text in found]).double()
    assert len(found) == len(set(found)) > 3000
    assert lengths.std() > 50
    assert "Assert statements are a convenient way to insert debugging assertions into a program:" in found
    corpus.sentences.cache_clear()
    assert corpus.sentences() == found, "and always in one order"


def test_tokens_are_characters_an_end_and_padding() -> None:
    train, test = corpus.split(train=40, test=8, length=60)
    assert train.shape == (40, 60)
    for text, row in zip(corpus.sentences(), train.tolist(), strict=False):
        read = "".join(chr(token - corpus.FIRST + ord(" ")) for token in row if token >= corpus.FIRST)
        assert read == "".join(character for character in text[:60] if " " <= character <= "~")
        assert row[len(text) :] == ([corpus.END] + [corpus.IGNORED] * 60)[: max(0, 60 - len(text))]
    assert int(train.max()) < corpus.VOCABULARY
    assert test.tolist() == corpus.split(train=1, test=8, length=60)[1].tolist(), "held out, whatever is trained on"


def test_a_python_without_the_text_is_told(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    corpus.sentences.cache_clear()
    with pytest.raises(UserError, match=r"lacks pydoc_data.*use a complete Python, or another problem"):
        accum_sweep.run(["problem=char_gpt", "tracking=none"])


def test_a_token_is_predicted_from_those_before_it_alone() -> None:
    problem = build("char_gpt")
    inputs, targets = batch(problem)
    logits = problem.model(inputs)
    changed = inputs.clone()
    changed[:, 20:] = 50
    assert torch.equal(problem.model(changed)[:, :20], logits[:, :20])
    assert not torch.equal(problem.model(changed)[:, 20:], logits[:, 20:])
    padding = targets == corpus.IGNORED
    assert padding.any()
    loss, _ = problem.loss(problem.model, (inputs, targets))
    assert problem.loss(problem.model, (inputs.where(~padding, 50), targets))[0] == loss


def test_dropout_is_in_training_alone() -> None:
    problem = build("char_gpt", dropout=0.5)
    assert problem.evaluate is not None
    first, second = (problem.loss(problem.model, batch(problem))[0].item() for _ in range(2))
    assert first != second
    assert problem.evaluate(problem.model, CPU) == problem.evaluate(problem.model, CPU)


def test_the_loss_is_summed_in_float32_at_least() -> None:
    problem = build("char_gpt", torch.bfloat16)
    loss_sum, items = problem.loss(problem.model, batch(problem))
    assert loss_sum.dtype == torch.float32
    assert (loss_sum / items).item() == pytest.approx(math.log(corpus.VOCABULARY), rel=0.02), (
        "of a model that knows nothing"
    )


@HF
def test_the_loss_is_that_of_hugging_face_itself() -> None:
    problem = build("causal_lm")
    loss_sum, items = problem.loss(problem.model, batch(problem))
    assert (loss_sum / items).item() == pytest.approx(problem.model(**batch(problem)).loss.item(), rel=1e-6)


def model_of(**settings: Any) -> Problem:
    """Build problem=causal_lm with these keys alone saying what the model is."""
    return build("causal_lm", **({"config": None} | settings))


def described(problem: Problem) -> dict[str, Any]:
    return problem.model.config.to_dict()  # type: ignore[union-attr, operator, no-any-return]


@HF
@pytest.mark.usefixtures("_no_network")
def test_a_model_is_its_keys_a_file_or_a_folder(tmp_path: Path) -> None:
    first = model_of(model_type="gpt2", config={"n_embd": 32, "n_layer": 3})
    assert len(first.blocks) == 3
    assert described(first)["resid_pdrop"] == 0, "without dropout"
    assert described(first)["use_cache"] is False
    for parameter in first.model.parameters():
        parameter.data.mul_(1.1)  # so that they are not what the seed gives
    first.model.save_pretrained(tmp_path / "a model")  # type: ignore[operator]
    folder = str(tmp_path / "a model")
    random = model_of(folder=folder)
    from_file = model_of(config_file=f"{folder}/config.json")
    local = model_of(folder=folder, weights="local")
    index = batch(first)
    losses = [problem.loss(problem.model, index)[0].item() for problem in (first, random, from_file, local)]
    assert losses[0] == losses[3] != losses[1]
    assert losses[1] == losses[2]
    assert difference(gradient(local, SPLITS["uneven"]), gradient(local, [64])) <= 1e-14


@HF
@pytest.mark.usefixtures("_no_network")
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model_type": "lama"}, ["problem.model_type=lama", "did you mean llama?"]),
        (
            {"config": {"hiden_size": 8}},
            ["problem.config.hiden_size=8", "no key of llama", "did you mean hidden_size?"],
        ),
        ({"config": {"hidden_size": "big"}}, ["problem.config=", "hidden_size", "mend it"]),
        ({"config": {"vocab_size": 10}}, ["problem.model_type=llama", "vocab_size=10", "97 tokens"]),
        ({"config": {"max_position_embeddings": 8}}, ["max_position_embeddings=8", "problem.context=32"]),
        ({"model_type": "bert"}, ["problem.model_type=bert", "sees the tokens", "is_decoder: true"]),
        ({"model_type": "t5"}, ["problem.model_type=t5", "refuses it"]),
        ({"config_file": "wrong.json"}, ["problem.config_file=wrong.json", "no config.json"]),
        ({"config_file": "typeless.json"}, ["problem.config_file=typeless.json", "model_type"]),
        ({"config_file": "other.json"}, ["problem.config_file=other.json", "lama is no", "did you mean llama?"]),
        ({"folder": ".", "weights": "local"}, ["problem.folder=.", "transformers", "refuses it"]),
    ],
)
def test_what_transformers_refuses_is_told_by_its_key(workdir: Path, settings: dict[str, Any], told: list[str]) -> None:
    (workdir / "wrong.json").write_text("no json")
    (workdir / "typeless.json").write_text("{}")
    (workdir / "other.json").write_text('{"model_type": "lama"}')
    (workdir / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 99, **TINY}))
    with pytest.raises(UserError) as caught:
        model_of(**settings)
    assert not [part for part in told if part not in str(caught.value)], caught.value
    assert len(str(caught.value)) < 700


@HF
def test_weights_that_do_not_fit_are_told(tmp_path: Path) -> None:
    model_of(config=TINY).model.save_pretrained(tmp_path)  # type: ignore[operator]
    written = json.loads((tmp_path / "config.json").read_text())
    for change in ({"num_hidden_layers": 2}, {"intermediate_size": 24}):
        (tmp_path / "config.json").write_text(json.dumps(written | change))
        with pytest.raises(
            UserError, match=r"problem.folder=.*: \d+ weights of its config.json are missing .*problem.weights=random"
        ):
            model_of(folder=str(tmp_path), weights="local")


@HF
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["problem.folder=no/where"], ["problem.folder=no/where", "there is no file no/where/config.json"]),
        (["problem.config_file=no.json"], ["problem.config_file=no.json", "there is no file no.json"]),
        (["problem.weights=local"], ["problem.weights=local", "problem.folder, which is null"]),
        (["problem.weights=hub"], ["problem.weights=hub", "'random' or 'local'"]),
        (["problem.config_file=/dev/null", "problem.folder=."], ["problem.folder=.", "there is no file config.json"]),
    ],
)
def test_bad_keys_are_told(workdir: Path, words: list[str], told: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        accum_sweep.run(["problem=causal_lm", *words, "tracking=none"])
    assert not [part for part in told if part not in str(caught.value)], caught.value
    assert not list(workdir.iterdir())


@HF
def test_only_one_key_may_say_what_the_model_is(workdir: Path) -> None:
    Path("config.json").write_text("{}")
    for other in ({"model_type": "llama"}, {"config": TINY}, {"config_file": "config.json"}):
        with pytest.raises(UserError, match=f"problem.folder=.: excludes problem.{next(iter(other))}"):
            model_of(**({"folder": "."} | other))


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'accum-sweep\[hf\]'"):
        causal_lm.Params(name="causal_lm")
    assert char_gpt.Params(name="char_gpt"), "which needs none"


@HF
@pytest.mark.parametrize("problem", ["char_gpt", "causal_lm"])
def test_a_run_of_it(workdir: Path, problem: str) -> None:
    sizes = ["problem.context=16", "problem.train_sequences=32", "problem.test_sequences=4", "accum_steps=2"]
    record = accum_sweep.run([f"problem={problem}", *sizes, "tracking=none", "device=cpu"])
    assert record.status == "finished", record.reason
    assert record.series["train/loss"][0] == pytest.approx(math.log(corpus.VOCABULARY), rel=0.1)
    assert math.isfinite(record.metrics["test/loss"] or math.nan)
