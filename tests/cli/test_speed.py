"""How fast a CPU would train: two small models stand for the whole one, and the slower data type is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from cusearch_async.cli.preflight import speed
from cusearch_async.cli.preflight.shapes import published, read_shape
from cusearch_async.config import STARTER, Config, load_config
from cusearch_async.learner import matmul
from cusearch_async.learner.model import SampledLogprobs

TOKENS = speed.ROWS * speed.LENGTH


def config(*overrides: str) -> Config:
    return load_config(Path("atlas"), overrides)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[float, float]]:
    """Seconds of one and of three layers, by data type."""
    seconds = {"float32": (1.0, 5.0), "bfloat16": (2.0, 10.0)}

    def fake(shape: Any, dtype: str, layers: int, learner: Any) -> float:
        return seconds[dtype][(1, 3).index(layers)]

    monkeypatch.setattr(speed, "_timed", fake)
    return seconds


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """The models that are timed, with the tokens of a piece of the logits."""
    found = []

    def wrapped(model: Any, chunk: int) -> SampledLogprobs:
        found.append((model, chunk))
        return SampledLogprobs(model, chunk)

    monkeypatch.setattr(speed, "SampledLogprobs", wrapped)
    return found


@pytest.mark.usefixtures("timed")
def test_a_whole_model_takes_its_layers_and_a_layer_that_is_not_trained_a_third():
    shape = read_shape(str(STARTER))
    assert shape is not None
    assert shape.layers == 4
    alone = ("--loss.kl_coef", "0", "--loss.minibatch", "96")
    assert speed.seconds_per_token(config(*alone), shape, "float32") == (1 + 3 * 2) / TOKENS
    upper = config(*alone, "--learner.trained_layers", "1")
    assert speed.seconds_per_token(upper, shape, "float32") == pytest.approx((1 + 3 * 2 / 3) / TOKENS)


@pytest.mark.usefixtures("timed")
def test_passes_without_a_gradient_count_and_those_that_are_computed_again():
    """π_ref of all, and π_prox of two mini-batches of three."""
    shape = read_shape(str(STARTER))
    assert shape is not None
    assert config().method.budget == 3 * config().loss.minibatch
    assert speed.seconds_per_token(config(), shape, "float32") == pytest.approx(7 * (1 + 5 / 9) / TOKENS)
    again = config("--learner.gradient_checkpointing", "true", "--loss.kl_coef", "0", "--loss.minibatch", "96")
    assert speed.seconds_per_token(again, shape, "float32") == pytest.approx(7 * 4 / 3 / TOKENS)


@pytest.mark.usefixtures("timed")
def test_the_slower_data_type_is_warned_of():
    shape = read_shape(str(STARTER))
    assert shape is not None
    fine = speed.speed_on_cpu(config("--model.dtype", "float32"), shape)
    assert fine is not None
    assert fine.status == "ok"
    assert fine.text == (
        "one core trains about 94 tokens a second in float32, 47 in bfloat16; 96 trajectories of 256 tokens take "
        "about 261 s"
    )
    slow = speed.speed_on_cpu(config("--model.dtype", "bfloat16"), shape)
    assert slow is not None
    assert slow.status == "warning"
    assert slow.text.endswith("take about 523 s: set model.dtype = 'float32'")


@pytest.mark.parametrize(
    ("own", "seconds", "expected"),
    [
        ("float32", {"float32": 1.7, "bfloat16": 1.0}, "bfloat16"),
        ("float32", {"float32": 1.4, "bfloat16": 1.0}, "float32"),
        ("bfloat16", {"float32": 1.0, "bfloat16": 1.7}, "float32"),
        ("bfloat16", {"float32": 1.7, "bfloat16": 1.0}, "bfloat16"),
    ],
)
def test_the_fastest_data_type_is_the_configs_unless_the_other_is_much_faster(
    monkeypatch: pytest.MonkeyPatch, own: str, seconds: dict[str, float], expected: str
):
    monkeypatch.setattr(speed, "seconds_per_token", lambda config, shape, dtype: seconds[dtype])
    assert speed.fastest_dtype(config("--model.dtype", own), read_shape(str(STARTER))) == expected


def test_of_a_model_that_cannot_be_timed_the_data_type_is_the_configs(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> float:
        raise ImportError("needs mamba-ssm")

    monkeypatch.setattr(speed, "_timed", broken)
    for shape in (read_shape(str(STARTER)), published("Qwen/Qwen2.5-3B")):
        assert shape is not None
        for dtype in ("float32", "bfloat16"):
            assert speed.fastest_dtype(config("--model.dtype", dtype), shape) == dtype


def test_a_model_that_cannot_be_made_here_does_not_end_the_check(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> float:
        raise ImportError("needs mamba-ssm\nand more")

    monkeypatch.setattr(speed, "_timed", broken)
    shape = read_shape(str(STARTER))
    assert shape is not None
    found = speed.speed_on_cpu(config(), shape)
    assert found is not None
    assert found.status == "warning"
    assert found.text.endswith("cannot be made here: needs mamba-ssm")


def test_a_model_that_nobody_trains_on_a_cpu_is_not_timed():
    shape = published("Qwen/Qwen2.5-3B")
    assert shape is not None
    assert speed.speed_on_cpu(config(), shape) is None


@pytest.mark.system
def test_real_passes_are_timed_and_the_number_of_threads_is_left_alone():
    import torch

    shape = read_shape(str(STARTER))
    assert shape is not None
    threads = torch.get_num_threads()
    found = speed.speed_on_cpu(config(), shape)
    assert found is not None
    assert found.what == "speed"
    assert torch.get_num_threads() == threads


@pytest.mark.system
def test_what_is_timed_multiplies_as_the_learner_does(monkeypatch: pytest.MonkeyPatch):
    """Before, `check` took float32 for half as fast as it is on processors of AMD."""
    asked: list[Any] = []
    monkeypatch.setattr(matmul, "use_fastest", lambda model, learner: asked.append(learner))
    shape, of = read_shape(str(STARTER)), config("--learner.trained_layers", "2")
    assert shape is not None
    speed.speed_on_cpu(of, shape)
    assert asked == [of.learner] * 4, "two data types, models of one and of three layers"


@pytest.mark.system
def test_as_large_a_share_of_the_logits_is_computed_twice_as_in_a_full_micro_batch(made: list[tuple[Any, int]]):
    shape, of = read_shape(str(STARTER)), config("--learner.micro_batch_tokens", "16384")
    speed.speed_on_cpu(of, shape)
    assert {chunk for _, chunk in made} == {speed.ROWS * speed.LENGTH // 16}


@pytest.mark.system
def test_with_an_adapter_its_gradients_alone_are_timed(made: list[tuple[Any, int]]):
    """Those of all weights, which have none then, took a third of the time."""
    speed.speed_on_cpu(config("--learner.lora.rank", "8"), read_shape(str(STARTER)))
    gradients = {name for model, _ in made for name, one in model.named_parameters() if one.grad is not None}
    assert gradients
    assert all(".lora_" in name for name in gradients)


@pytest.mark.system
@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_of_few_layers_is_timed_with_those(layers):
    """Before, `check` ended with an IndexError of transformers."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen3Config(**sizes, head_dim=8, vocab_size=64, num_hidden_layers=layers)
    shape = replace(read_shape(str(STARTER)), config=model, layers=layers, parameters=10_000)
    found = speed.speed_on_cpu(config("--learner.trained_layers", "3"), shape)
    assert (found.status, "tokens a second" in found.text) != ("warning", False), found
