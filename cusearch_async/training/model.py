"""The policy as the learner sees it: log-probabilities of the sampled tokens, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from cusearch_async.errors import ConfigError, first_line

LOGITS_AT_ONCE = 4096
"""Tokens whose logits are held at a time: with 150,000 tokens of vocabulary, logits dwarf the model."""


def load_causal_lm(path: str, dtype: str, attention: str = "sdpa") -> Any:
    """Raises: ConfigError naming the model and what is wrong."""
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=attention)
    except ImportError as error:
        raise ConfigError(f"learner.attention {attention!r} cannot be used: {first_line(error)}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {path!r} cannot be loaded: {first_line(error)}") from error
    return model


class Head(nn.Linear):
    """The LM head for all sampled tokens of a forward pass in one call, their logits in pieces.

    One call, because ZeRO-3 gathers the weight at each call, on all ranks together: ranks whose trajectories make
    different numbers of pieces would wait for each other without end."""

    entropy_has_gradient = False

    @classmethod
    def in_place_of(cls, head: nn.Linear) -> Head:
        """A head with the very parameters of `head`, tied ones included."""
        with torch.device("meta"):
            own = cls(head.in_features, head.out_features, bias=head.bias is not None)
        own.weight, own.bias = head.weight, head.bias
        return own

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor | None = None, temperature: float = 1.0) -> Any:
        """Logits; with `targets` [S], the log-probability and the entropy [S], float32, of these tokens."""
        if targets is None:
            return super().forward(hidden)
        parts = [
            checkpoint(self._logprobs, h, t, temperature, use_reentrant=False)
            if torch.is_grad_enabled() and len(hidden) > LOGITS_AT_ONCE
            else self._logprobs(h, t, temperature)
            for h, t in zip(torch.split(hidden, LOGITS_AT_ONCE), torch.split(targets, LOGITS_AT_ONCE), strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _logprobs(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = functional.linear(hidden, self.weight, self.bias).float() / temperature
        log_all = torch.log_softmax(logits, dim=-1)
        chosen = log_all.gather(-1, targets[:, None]).squeeze(-1)
        with torch.set_grad_enabled(self.entropy_has_gradient and torch.is_grad_enabled()):
            entropy = -(log_all.exp() * log_all).sum(-1)
        return chosen, entropy


class SampledLogprobs(nn.Module):
    """Wraps a causal language model; the module that DeepSpeed trains.

    Only positions that predict a sampled token go through the LM head."""

    def __init__(self, model: Any, entropy_has_gradient: bool = False) -> None:
        """`entropy_has_gradient` is for an entropy bonus; it keeps as many more logits for the backward pass."""
        super().__init__()
        self.model = model
        head = Head.in_place_of(model.get_output_embeddings())
        head.entropy_has_gradient = entropy_has_gradient
        model.set_output_embeddings(head)

    def forward(
        self,
        token_ids: torch.Tensor,
        sampled: torch.Tensor,
        temperature: float,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy [S], float32, of every sampled token. `sampled` [S] are the places of these
        tokens in the flattened `token_ids`.

        `token_ids` [B, L] are padded on the right, so causal attention never sees the padding; or, with
        `positions` [1, L], one row holds several trajectories, each counting from 0 and seeing itself only. The
        first token of a trajectory is never a sampled one. Both results are of the distribution at `temperature`, the
        one that was sampled from."""
        hidden = self.model.base_model(input_ids=token_ids, position_ids=positions, use_cache=False).last_hidden_state
        predicting = hidden.flatten(0, 1)[sampled - 1]
        targets = token_ids.flatten()[sampled]
        log_policy, entropy = self.model.get_output_embeddings()(predicting, targets, temperature)
        return log_policy, entropy


def recompute_layers(model: Any) -> None:
    """Keep no activations inside the layers and compute them again in the backward pass (gradient checkpointing).

    transformers does so for a layer in training mode only. The modules within the layers stay in evaluation mode:
    a policy that drops out would not be the one that π_prox and the engines are of."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True


def save_model(model: Any, tensors: dict[str, torch.Tensor], tokenizer: Any, folder: Path) -> None:
    """Write the policy as a Hugging Face folder that any tool loads."""
    model.save_pretrained(folder, state_dict=tensors)
    tokenizer.save_pretrained(folder)
