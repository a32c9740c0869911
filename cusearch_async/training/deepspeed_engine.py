"""The policy, its optimizer and their checkpoints on DeepSpeed. The only module that imports it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import nn

from cusearch_async.config import Config
from cusearch_async.errors import ConfigError, first_line
from cusearch_async.training.checkpoint import is_sealed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# A CPU all-reduce that is compiled at start-up behind a lock file: a learner that is killed meanwhile leaves the lock,
# and every later one would wait for it without end. Gloo does the same work.

_WRITTEN_BY_DEEPSPEED = [ZeroStageEnum, LossScaler, fragment_address]
"""What a checkpoint of its optimizers holds besides tensors and plain values."""


class DeepSpeedEngine:
    """`module` with its optimizer. Every rank makes the same calls in the same order."""

    def __init__(self, module: nn.Module, config: Config) -> None:
        self._module = module
        self._is_sharded = config.learner.zero_stage == 3
        self.deepspeed, *_ = deepspeed.initialize(
            model=module, model_parameters=module.parameters(), config=_settings(config)
        )
        self.deepspeed.checkpoint_engine.load = _load_tensors
        self.device: torch.device = self.deepspeed.device
        self.gradient_square = torch.zeros((), device=self.device)
        """Finite as long as all gradients since the last optimizer step, and their norm, are."""
        for parameter in module.parameters():
            parameter.register_hook(self._add_square)  # type: ignore[no-untyped-call]

    def _add_square(self, gradient: torch.Tensor) -> None:
        """One reduction per parameter, without waiting for the device."""
        self.gradient_square += torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32).square()

    def __call__(self, *inputs: Any) -> Any:
        """The module's forward pass."""
        return self.deepspeed(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Add to the gradient, which is the mean over ranks."""
        self.deepspeed.backward(loss, scale_wrt_gas=False)

    def step(self, lr: float) -> float | None:
        """One optimizer step with the gradient since the last one; returns its norm before clipping, or None where
        DeepSpeed keeps none (ZeRO stage 0 in float32)."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = lr
        self.deepspeed.step()
        self.gradient_square.zero_()
        norm = self.deepspeed.get_global_grad_norm()
        return None if norm is None else float(norm)

    def gather(self, model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
        """The parameters of `model`, a part of the module, on the CPU on ranks that `keep` them, else nothing; with
        ZeRO-3 they are collected one by one."""
        tensors = {}
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self._is_sharded):
                if keep:
                    tensors[name] = parameter.detach().to("cpu", copy=True)
        return tensors

    def save(self, folder: Path) -> None:
        """Write parameters and optimizer into `folder`."""
        self.deepspeed.save_checkpoint(str(folder), tag="deepspeed", save_latest=False)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote.

        Raises: ConfigError for a file that holds anything but tensors and plain values, or is deleted meanwhile."""
        try:
            self.deepspeed.load_checkpoint(str(folder), tag="deepspeed")
        except pickle.UnpicklingError as error:
            raise ConfigError(
                f"checkpoint {folder} holds data that a learner never writes: {first_line(error)}"
            ) from error
        except (OSError, AssertionError) as error:  # DeepSpeed asserts that it finds files
            if is_sealed(folder):
                raise
            raise ConfigError(
                f"checkpoint {folder} was deleted while it was read: another learner of this run is alive; start this "
                "one again"
            ) from error


def _load_tensors(path: str, map_location: Any = None) -> Any:
    """In place of DeepSpeed's own, which unpickles: whoever can write into the run's folder could run code here."""
    with torch.serialization.safe_globals(_WRITTEN_BY_DEEPSPEED):
        return torch.load(path, map_location=map_location, weights_only=True)


def _settings(config: Config) -> dict[str, Any]:
    """Everything that DeepSpeed would otherwise default to something else is explicit."""
    settings = config.learner
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.grad_clip,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": settings.lr,
                "weight_decay": settings.weight_decay,
                "betas": [0.9, 0.999],
                "torch_adam": True,
            },
        },
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "zero_optimization": {"stage": settings.zero_stage},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
