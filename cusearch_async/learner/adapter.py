"""LoRA: an adapter of low rank that is trained in place of the model's weights. The only module that imports peft.

Every adapted layer computes W x + (alpha / rank) B A x. A is drawn from run.seed and B is zero, so version 0 is the
model itself. The model keeps its class, and its other parameters their names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cusearch_async.config import LoraConfig
from cusearch_async.errors import ConfigError, first_line
from cusearch_async.weights.interface import ADAPTER_CONFIG, ADAPTER_TENSORS
from cusearch_async.weights.tensor_file import write_tensors

_OWN = ".lora_"
"""In the names of an adapter's parameters, and in no other's."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter in a model."""

    config: dict[str, Any]
    """adapter_config.json, as peft and vLLM read it."""
    layers: list[Any]
    """peft's layers, in place of those that they adapt."""

    @classmethod
    def into(cls, model: Any, settings: LoraConfig, base: str, seed: int) -> Adapter:
        """A new adapter in `model`, which was loaded from `base`; only the adapter's parameters want a gradient.

        Raises: ConfigError for a target that the model has no layer of, and where peft adapts what is no linear layer,
        like the experts of a mixture."""
        import peft  # noqa: PLC0415  (takes a second, and is needed only here)
        from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415

        known = sorted({name for name, *_ in linear_layers(model)})
        for name in settings.names:  # peft wants only one of them to be there
            if name not in known:
                raise ConfigError(
                    f"learner.lora.targets: the model has no linear layer {name!r}; it has {', '.join(known)}"
                )
        targets = list(settings.names) or known  # for "all-linear" peft takes the experts of a mixture, too
        if not targets:
            raise ConfigError(f"learner.lora cannot be used with {base!r}, which has no linear layers but its LM head")
        shared: dict[str, Any] = {"r": settings.rank, "lora_alpha": settings.alpha, "lora_dropout": 0.0}
        lora = peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **shared)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                peft.inject_adapter_in_model(lora, model)
        except ValueError as error:
            raise ConfigError(f"learner.lora cannot be used with {base!r}: {first_line(error)}") from error
        adapted: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
        for name, layer in adapted.items():
            if not isinstance(layer.get_base_layer(), torch.nn.Linear):
                kind = type(layer.get_base_layer()).__name__
                raise ConfigError(
                    f"learner.lora cannot be used with {base!r}: {name} is a {kind}, not a linear layer; name layers "
                    "of its attention in learner.lora.targets, like q_proj"
                )
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            **shared,
            "bias": "none",
            "target_modules": sorted({name.rpartition(".")[2] for name in adapted}),
            "inference_mode": True,
        }
        return cls(config, list(adapted.values()))

    @contextmanager
    def without(self, forward: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """`forward` of the model as it was before training: no second model."""
        for layer in self.layers:
            layer.enable_adapters(False)
        try:
            yield forward
        finally:
            for layer in self.layers:
                layer.enable_adapters(True)

    @staticmethod
    def owns(name: str) -> bool:
        """Whether a parameter of this name is the adapter's."""
        return _OWN in name

    @staticmethod
    def by_peft_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The adapter's parameters among `tensors`, by their names in adapter_model.safetensors."""
        return {
            f"base_model.model.{name.replace('.default.', '.')}": tensor
            for name, tensor in tensors.items()
            if _OWN in name
        }

    def merged(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters of the model with W + (alpha / rank) B A in place of W, by Hugging Face names, on the CPU."""
        scale = self.config["lora_alpha"] / self.config["r"]
        result = {}
        for name, tensor in tensors.items():
            if _OWN in name:
                continue
            weight = tensor.to("cpu")
            layer, _, kind = name.rpartition(".base_layer.")
            if kind == "weight":
                a, b = (tensors[f"{layer}.lora_{side}.default.weight"].float() for side in "AB")
                weight = (weight.float() + scale * (b @ a)).to(weight.dtype)
            result[name.replace(".base_layer.", ".")] = weight
        return result


def linear_layers(model: Any) -> tuple[tuple[str, int, int], ...]:
    """Those that can have an adapter, which are all but the LM head: name, inputs, outputs."""
    head = model.get_output_embeddings()
    return tuple(
        (name.rpartition(".")[2], module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    )


def save_adapter(adapter: Adapter, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write peft's folder of an adapter."""
    folder.mkdir(parents=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(adapter.config, indent=1), encoding="utf-8")
    write_tensors(folder / ADAPTER_TENSORS, adapter.by_peft_names(tensors))
