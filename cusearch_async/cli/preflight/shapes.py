"""The shape of a model, without its weights: any causal LM that transformers can build."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from cusearch_async.config import ModelConfig

_SIZES = (
    *("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings"),
)
PUBLISHED: dict[str, dict[str, Any]] = {
    str(name): dict(zip(_SIZES, sizes, strict=True))
    | {"dtype": "bfloat16", "architectures": [f"{str(sizes[0]).capitalize()}ForCausalLM"]}
    for name, *sizes in (
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "llama", 30, 576, 9, 3, 1536, 64, 49152, 8192, True),
        ("Qwen/Qwen2.5-0.5B", "qwen2", 24, 896, 14, 2, 4864, 64, 151936, 32768, True),
        ("Qwen/Qwen2.5-1.5B", "qwen2", 28, 1536, 12, 2, 8960, 128, 151936, 131072, True),
        ("Qwen/Qwen2.5-3B", "qwen2", 36, 2048, 16, 2, 11008, 128, 151936, 32768, True),
        ("Qwen/Qwen2.5-7B", "qwen2", 28, 3584, 28, 4, 18944, 128, 152064, 131072, False),
        ("Qwen/Qwen3-0.6B", "qwen3", 28, 1024, 16, 8, 3072, 128, 151936, 40960, True),
        ("Qwen/Qwen3-1.7B", "qwen3", 28, 2048, 16, 8, 6144, 128, 151936, 40960, True),
        ("Qwen/Qwen3-4B", "qwen3", 36, 2560, 32, 8, 9728, 128, 151936, 40960, True),
        ("Qwen/Qwen3-8B", "qwen3", 36, 4096, 32, 8, 12288, 128, 151936, 40960, False),
        ("meta-llama/Llama-3.2-3B", "llama", 28, 3072, 24, 8, 8192, 128, 128256, 131072, True),
    )
}
"""Used where a model's config.json cannot be read. Source: those files on the Hugging Face Hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    parameters: int
    """Elements; a tied LM head counts once."""
    largest_layer: int
    """Elements of the largest layer, or of a larger embedding."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    context: int
    """Longest sequence, in tokens."""
    tied: bool
    linear: tuple[tuple[str, int, int], ...] = field(repr=False)
    """Every layer that can have an adapter: name, inputs, outputs."""
    config: Any = field(repr=False, compare=False)


def shape_of(model: ModelConfig) -> ModelShape | None:
    """Of the run's model, without network: from its folder, from the Hub's local cache, or from PUBLISHED."""
    return read_shape(model.location) or published(model.path)


@functools.cache
def published(name: str) -> ModelShape | None:
    """Of a well-known model by its name on the Hub."""
    from transformers import AutoConfig  # noqa: PLC0415  (takes seconds to import)

    if name not in PUBLISHED:
        return None
    facts = {key: value for key, value in PUBLISHED[name].items() if key != "model_type"}
    return described(AutoConfig.for_model(PUBLISHED[name]["model_type"], **facts))


def read_shape(path: str) -> ModelShape | None:
    """Of a local folder, or of a Hub id in the local cache; None unless transformers can build it as a text model."""
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415  (as slow)
    from transformers import AutoConfig  # noqa: PLC0415  (takes seconds to import)

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError):
        return None
    return described(config)


def described(config: Any) -> ModelShape | None:
    """The shape of the causal LM of a transformers config; None when there is none."""
    from cusearch_async.learner.adapter import linear_layers  # noqa: PLC0415  (imports torch)
    from cusearch_async.learner.model import layers_of  # noqa: PLC0415  (the same)

    try:
        model = on_meta(config)
        layers = layers_of(model)
        largest = max(sum(p.numel() for p in each.parameters()) for each in (*layers, model.get_input_embeddings()))
        heads = config.num_attention_heads
        return ModelShape(
            parameters=model.num_parameters(),
            largest_layer=largest,
            layers=len(layers),
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            hidden=config.hidden_size,
            vocab=config.vocab_size,
            context=config.max_position_embeddings,
            tied=config.tie_word_embeddings,
            linear=linear_layers(model),
            config=config,
        )
    except (ValueError, AttributeError, NotImplementedError):  # no causal LM, or not one of text alone
        return None


def on_meta(config: Any, **options: Any) -> Any:
    """The model without any memory for its parameters."""
    import torch  # noqa: PLC0415  (takes seconds to import)
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  (the same)

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **options)
