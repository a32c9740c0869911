"""Small random models of the families that people train, for tests, and for the table in docs/models.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SIZES: dict[str, Any] = {
    **{"vocab_size": 384, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
WINDOWED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
ROUTED = EXPERTS | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
SCALED = "so it scales or caps them in between", "its logits are scaled or capped after the LM head"


@dataclass(frozen=True, slots=True)
class Kind:
    """A family by its `model_type` in config.json."""

    name: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    """Part of the message with which the learner refuses it; empty where it is trained."""
    why: str = ""
    """The same for the table."""


KINDS = (
    Kind("Qwen2.5", "qwen2", TIED | {"use_sliding_window": False}),
    Kind("Qwen3", "qwen3", TIED),
    Kind("Llama 3.x", "llama", TIED | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    Kind("SmolLM2", "llama", TIED),
    Kind("SmolLM3", "smollm3", TIED | {"no_rope_layers": [1, 0]}),
    Kind("Mistral", "mistral", UNTIED | {"sliding_window": None}),
    Kind("Phi-4-mini", "phi3", TIED | {"partial_rotary_factor": 0.75}),
    Kind("Gemma 3", "gemma3_text", TIED | WINDOWED | {"query_pre_attn_scalar": 32}),
    Kind("OLMo 2", "olmo2", UNTIED),
    Kind("OLMo 3", "olmo3", UNTIED | WINDOWED),
    Kind("Qwen3 MoE", "qwen3_moe", UNTIED | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    Kind("GLM-4 MoE", "glm4_moe", UNTIED | ROUTED),
    Kind("GPT-2", "gpt2", {"n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 2048}),
    Kind(
        "GPT-OSS",
        "gpt_oss",
        UNTIED | WINDOWED | {"num_local_experts": 8, "num_experts_per_tok": 2},
        "does not support an attention implementation through torch.nn.functional.scaled_dot_product_attention",
        "transformers has no SDPA attention for it",
    ),
    Kind("Gemma 2", "gemma2", TIED | {"query_pre_attn_scalar": 32, "final_logit_softcapping": 3.0}, *SCALED),
    Kind("Granite 3", "granite", TIED | {"logits_scaling": 8.0}, *SCALED),
    Kind("Command R", "cohere", TIED | {"logit_scale": 0.0625}, *SCALED),
)
