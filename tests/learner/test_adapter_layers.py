"""The adapter in a model: off for the reference, and merged for a checkpoint. With hand-made layers, without peft.
The reference in the host's memory: on the device for its pass, and only then."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from cusearch_async.config import LoraConfig
from cusearch_async.errors import ConfigError
from cusearch_async.learner.adapter import Adapter
from cusearch_async.learner.model import whole_reference
from tests.learner.test_model import EXPERTS, random_model


class Layer:
    """peft's layer, as far as it is switched on and off."""

    is_on = True

    def enable_adapters(self, enabled: bool) -> None:
        self.is_on = enabled


@pytest.mark.parametrize("fails", [False, True])
def test_the_adapter_is_off_for_the_reference_and_on_again_after_it(fails):
    layers = [Layer(), Layer()]
    seen = []

    def forward():
        seen.append([layer.is_on for layer in layers])
        if fails:
            raise KeyError

    with contextlib.suppress(KeyError), Adapter({}, layers).without(forward) as found:
        found()
    assert seen == [[False, False]]
    assert [layer.is_on for layer in layers] == [True, True]


def test_a_merged_adapter_is_the_sum_of_both_at_the_adapters_scale():
    """W + (alpha / rank) B A, with alpha 8 and rank 2: four times B A. What is not adapted stays, also a bias."""
    a, b = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 3.0], [0.0, 2.0]])
    whole = torch.full((3, 2), 10.0)
    layer = "model.layers.0.q_proj"
    tensors = {
        f"{layer}.base_layer.weight": whole.to(torch.bfloat16),
        f"{layer}.base_layer.bias": torch.ones(3),
        f"{layer}.lora_A.default.weight": a,
        f"{layer}.lora_B.default.weight": b,
        "model.norm.weight": torch.ones(2),
    }
    merged = Adapter({"lora_alpha": 8, "r": 2}, []).merged(tensors)
    assert set(merged) == {f"{layer}.weight", f"{layer}.bias", "model.norm.weight"}
    assert merged[f"{layer}.weight"].dtype == torch.bfloat16
    assert merged[f"{layer}.weight"].tolist() == (10 + 4 * torch.tensor([[1.0, 2], [1, 5], [0, 2]])).tolist()
    assert merged["model.norm.weight"].tolist() == [1, 1]


def test_what_workers_load_has_pefts_names_and_nothing_of_the_model():
    tensors = {"model.q.lora_A.default.weight": torch.zeros(1), "model.q.base_layer.weight": torch.ones(1)}
    found = Adapter.by_peft_names(tensors)
    assert list(found) == ["base_model.model.model.q.lora_A.weight"]
    assert Adapter.owns("model.q.lora_A.default.weight")
    assert not Adapter.owns("model.q.base_layer.weight")


def tied() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[1].weight = module[0].weight
    return module


@pytest.mark.parametrize("waits", [True, False])
def test_a_reference_is_the_same_after_its_pass_even_one_that_failed(waits):
    module, inputs = tied(), torch.ones(1, 3)
    wanted = module(inputs).detach()
    before = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    reference = whole_reference(module, torch.device("cpu"), waits)
    with contextlib.suppress(KeyError), reference() as forward:
        assert torch.equal(forward(inputs), wanted)
        raise KeyError
    assert {name: parameter.data_ptr() for name, parameter in module.named_parameters()} == before
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_reference_that_waits_is_on_the_gpu_for_its_pass_only():
    module = tied()
    reference = whole_reference(module, torch.device("cuda"), waits_on_host=True)
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
    with reference() as forward:
        assert {parameter.device.type for parameter in module.parameters()} == {"cuda"}
        assert module[0].weight is module[1].weight
        assert forward(torch.ones(1, 3, device="cuda")).device.type == "cuda"
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}


@pytest.mark.parametrize(("colocate", "is_sharded"), [(False, False), (True, False), (False, True)])
def test_a_checkpoint_holds_no_memory_of_a_gpu_that_is_given_back(colocate, is_sharded, tmp_path, monkeypatch):
    """Where engines take the GPU while it is written, the base model is copied too. ZeRO-3 has collected copies on the
    CPU: a second one was of the whole model."""
    from cusearch_async.learner import learner

    base, own = torch.ones(3), torch.ones(2)
    seen = {}
    adapter = SimpleNamespace(owns=lambda name: name == "own", merged=seen.update)
    engine = SimpleNamespace(parameters=lambda names, keep: {"base": base, "own": own}, capture=lambda _: lambda: None)
    engine.is_sharded = is_sharded
    config = SimpleNamespace(run=SimpleNamespace(colocate=colocate))
    parts = {"_adapter": adapter, "_engine": engine, "_config": config, "_tokenizer": None}
    parts |= {"_ranks": SimpleNamespace(is_leader=True), "_module": SimpleNamespace(model=None)}
    for name in ("save_adapter", "save_model", "saved_tensors"):
        monkeypatch.setattr(learner, name, lambda *_: None)
    learner.DeepSpeedLearner._capture(SimpleNamespace(**parts), tmp_path)()
    assert (seen["own"] is not own) is not is_sharded
    assert (seen["base"] is not base) is colocate


@pytest.mark.system
def test_an_adapter_of_what_is_no_linear_layer_is_refused_at_once():
    """GPT-2's layers have their weights the other way round; the first checkpoint failed."""
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = AutoModelForCausalLM.from_config(GPT2Config(**sizes))
    with pytest.raises(ConfigError, match=r"learner.lora cannot be used with 'gpt2', which has no linear layers but"):
        Adapter.into(model, LoraConfig(rank=2), "gpt2", 0)


@pytest.mark.system
def test_the_adapter_of_a_mixture_of_experts_is_in_its_attention():
    """Of `all-linear` peft makes the experts and the router, too: it was refused after the model was loaded."""
    model = random_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    adapter = Adapter.into(model, LoraConfig(rank=4), "m", 0)
    assert adapter.config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]


@pytest.mark.system
def test_experts_that_peft_would_adapt_are_refused_with_what_to_name():
    """GLM-4's dense layer has layers of the experts' names."""
    model = random_model("glm4_moe", **EXPERTS)
    with pytest.raises(ConfigError, match=r"is a \w+, not a linear layer; name layers of its attention in lea"):
        Adapter.into(model, LoraConfig(rank=4), "m", 0)
    adapter = Adapter.into(random_model("glm4_moe", **EXPERTS), LoraConfig(rank=4, targets=["q_proj"]), "m", 0)
    assert adapter.config["target_modules"] == ["q_proj"]
