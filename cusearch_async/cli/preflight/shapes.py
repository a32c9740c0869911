"""The shape of a model, without its weights: any causal LM that transformers can build."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from cusearch_async.config import ModelConfig

QWEN25: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936}
QWEN3: dict[str, Any] = {
    **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128},
    **{"num_key_value_heads": 8, "max_position_embeddings": 40960},
}


def _sizes(layers: int, hidden: int, heads: int, intermediate: int, *, tied: bool, **others: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        **others,
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": QWEN25
    | _sizes(24, 896, 14, 4864, tied=True, num_key_value_heads=2, max_position_embeddings=32768),
    "Qwen/Qwen2.5-1.5B": QWEN25
    | _sizes(28, 1536, 12, 8960, tied=True, num_key_value_heads=2, max_position_embeddings=131072),
    "Qwen/Qwen2.5-3B": QWEN25
    | _sizes(36, 2048, 16, 11008, tied=True, num_key_value_heads=2, max_position_embeddings=32768),
    "Qwen/Qwen2.5-7B": QWEN25
    | _sizes(28, 3584, 28, 18944, tied=False, num_key_value_heads=4, max_position_embeddings=131072, vocab_size=152064),
    "Qwen/Qwen3-0.6B": QWEN3 | _sizes(28, 1024, 16, 3072, tied=True),
    "Qwen/Qwen3-1.7B": QWEN3 | _sizes(28, 2048, 16, 6144, tied=True),
    "Qwen/Qwen3-4B": QWEN3 | _sizes(36, 2560, 32, 9728, tied=True),
    "Qwen/Qwen3-8B": QWEN3 | _sizes(36, 4096, 32, 12288, tied=False),
    "meta-llama/Llama-3.2-3B": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256}
    | _sizes(28, 3072, 24, 8192, tied=True, num_key_value_heads=8, max_position_embeddings=131072, head_dim=128),
}
"""What is used of a model's config.json when that cannot be read. Source: those files on the Hugging Face Hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    parameters: int
    """Elements of all parameters; a tied LM head counts once."""
    largest_layer: int
    """Elements of the largest layer, or of the embedding if that is larger."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    context: int
    """Longest sequence, in tokens."""
    tied: bool
    """Whether the LM head is the embedding."""
    config: Any = field(repr=False, compare=False)
    """transformers' own."""


def shape_of(model: ModelConfig) -> ModelShape | None:
    """The shape of the run's model: from its folder, from the Hub's local cache, or one of PUBLISHED. Uses no network;
    None when it is not known here."""
    return read_shape(model.location) or published(model.path)


@functools.cache
def published(name: str) -> ModelShape | None:
    """The shape of a well-known model by its name on the Hub."""
    from transformers import AutoConfig  # noqa: PLC0415  (takes seconds to import)

    if name not in PUBLISHED:
        return None
    facts = {key: value for key, value in PUBLISHED[name].items() if key != "model_type"}
    return described(AutoConfig.for_model(PUBLISHED[name]["model_type"], **facts))


def read_shape(path: str) -> ModelShape | None:
    """The shape of a model in a local folder, or of a Hub id in the local cache.

    None when no config can be read, or when it is not that of a text model that transformers can build."""
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415  (as slow)
    from transformers import AutoConfig  # noqa: PLC0415  (takes seconds to import)

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError):
        return None
    return described(config)


def described(config: Any) -> ModelShape | None:
    """The shape of the causal LM of a transformers config; None when there is none."""
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


def layers_of(model: Any) -> list[Any]:
    """The modules whose activations gradient checkpointing computes again."""
    return [module for module in model.modules() if hasattr(type(module), "gradient_checkpointing")]
