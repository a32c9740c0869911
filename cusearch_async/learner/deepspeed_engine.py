"""The policy, its optimizer and their checkpoints on DeepSpeed. The only module that imports it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from cusearch_async.config import LearnerConfig, refuse_unknown
from cusearch_async.errors import ConfigError, first_line
from cusearch_async.learner.divided_state import KINDS, MASTER, MOMENTS, RANKS, UPDATES, Part, SavedState, file_of
from cusearch_async.learner.interface import is_sealed
from cusearch_async.learner.ranks import group_timeout
from cusearch_async.weights.tensor_file import write_tensors

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# A CPU all-reduce that is compiled at start-up behind a lock file: a learner that is killed meanwhile leaves the lock,
# and every later one would wait for it without end. Gloo does the same work.


class _OneByOne(nn.Module):
    """`module`, whose parameters are copied into separate memory one by one, as they are iterated.

    transformers maps a model's file into memory. DeepSpeed writes rank 0's values into every parameter before it
    divides it, and each written page would stay until the last tensor of that file is gone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in super().parameters(recurse):
            parameter.data = parameter.data.clone()
            yield parameter


def divide(module: nn.Module, settings: dict[str, Any]) -> None:
    """Divide the parameters among the ranks (ZeRO-3) one by one, so that no rank ever holds a whole model."""
    deepspeed.zero.Init(module=_OneByOne(module), config_dict_or_path=settings)
    device = get_accelerator().current_device_name()
    for buffer in module.buffers():  # DeepSpeed moves none of a divided module
        buffer.data = buffer.data.to(device)


def divided_forward(module: nn.Module, learner: LearnerConfig, dtype: str) -> Callable[..., Any]:
    """The forward pass of a `module` that is divided and not trained. Its parameters are gathered layer by layer, from
    the host's memory if they wait there."""
    settings = settings_of(learner, dtype)
    del settings["optimizer"]
    zero = {key: value for key, value in settings["zero_optimization"].items() if not key.startswith("offload")}
    if learner.reference == "cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    settings["zero_optimization"] = zero
    divide(module, settings)
    engine, *_ = deepspeed.initialize(model=module, config=settings)
    return cast(Callable[..., Any], engine)


class DeepSpeedEngine:
    """`module` with its optimizer. Every rank makes the same calls in the same order."""

    def __init__(self, module: nn.Module, learner: LearnerConfig, dtype: str) -> None:
        """`dtype` is the model's."""
        settings = settings_of(learner, dtype)
        self._stage = learner.zero_stage
        self.is_sharded = self._stage == 3
        if self.is_sharded:
            divide(module, settings)
        self._trained: dict[str, Any] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self.deepspeed, *_ = deepspeed.initialize(
            model=module, model_parameters=self._trained.values(), config=settings
        )
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        if self._stage == 0:
            self._undo_empty_step()
        # DeepSpeed makes a separate group, with torch's default time-out
        _set_pg_timeout(group_timeout(learner.collective_timeout_s), self.deepspeed.data_parallel_group)
        self.device: torch.device = self.deepspeed.device
        self.gradient_square = torch.zeros((), device=self.device)
        """Finite as long as all gradients since the last optimizer step, and their norm, are."""
        for parameter in self._trained.values():
            parameter.register_hook(self._add_square)

    @torch.no_grad()
    def _undo_empty_step(self) -> None:
        """At stage 0 in bfloat16 DeepSpeed makes a step without a gradient, to have all memory at once: Adam counts it,
        so that the first updates would be smaller than at other stages, and it decays the weights."""
        self.deepspeed.basic_optimizer.state.clear()
        for (_, parameter), (_, part) in zip(self._trained.items(), self._parts(), strict=True):
            part.masters.copy_(parameter)

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

    def parameters(self, named: Iterable[tuple[str, torch.Tensor]], keep: bool) -> dict[str, torch.Tensor]:
        """The parameters and buffers `named`, a part of the module's, on ranks that `keep` them, else nothing. The next
        optimizer step changes them, except with ZeRO-3: then they are collected one by one, and copied to the CPU."""
        tensors = {}
        for name, parameter in named:
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.is_sharded):
                if keep:
                    live = parameter.detach()
                    tensors[name] = live.to("cpu", copy=True) if self.is_sharded else live
        return tensors

    def offload(self) -> None:
        """Move weights, optimizer and gradients into the host's memory, until `reload`. For ZeRO stages 1 and 2."""
        self.deepspeed.offload_states(pin_memory=self.device.type == "cuda")
        for parameter in self._frozen:
            parameter.data = parameter.data.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Undo `offload`."""
        for parameter in self._frozen:
            parameter.data = parameter.data.to(self.device)
        self.deepspeed.reload_states()

    def _parts(self) -> Iterator[tuple[str, Part]]:
        """This rank's parts of the float32 masters, by the names of the parameters."""
        zero, flat = self.deepspeed.optimizer, self.deepspeed.basic_optimizer.param_groups[0]["params"]
        if self._stage == 0:
            for (name, parameter), masters in zip(self._trained.items(), flat, strict=True):
                yield name, Part(0, parameter.numel(), masters, 0)
        elif self._stage == 3:  # an equal share of each parameter, the last one with padding
            for name, parameter in self._trained.items():
                group, offset, share = zero.grad_position[zero.get_param_id(parameter)]
                start = min(self._rank * share, parameter.ds_numel)
                if length := min(share, parameter.ds_numel - start):
                    yield name, Part(start, length, zero.fp32_partitioned_groups_flat[group], offset)
        else:  # an equal share of all parameters end to end
            names = {id(parameter): name for name, parameter in self._trained.items()}
            [masters] = flat
            own = self._rank * len(masters)
            for parameter, at in zip(zero.round_robin_bit16_groups[0], zero.round_robin_bit16_offsets[0], strict=True):
                first, last = max(at, own), min(at + parameter.numel(), own + len(masters))
                if first < last:
                    yield names[id(parameter)], Part(first - at, last - first, masters, first - own)

    def _held(self, part: Part, kind: str) -> torch.Tensor:
        """One of KINDS of a part; zeros for moments before the first update."""
        states = self.deepspeed.basic_optimizer.state
        if kind != MASTER and not states:
            return torch.zeros(part.length)
        return part.of(part.masters if kind == MASTER else states[part.masters][kind])

    def capture(self, folder: Path) -> Callable[[], None]:
        """Copies all that a checkpoint in `folder` needs of this rank. The returned function writes it, in any thread,
        and raises OSError."""
        if self._stage == 0 and self._rank:  # rank 0 has the same
            return lambda: None
        adam = next(iter(self.deepspeed.basic_optimizer.state.values()), {"step": 0.0})
        copies = {
            f"{name}/{kind}": self._held(part, kind).detach().to("cpu", copy=True)
            for name, part in self._parts()
            for kind in KINDS
        }
        copies[UPDATES] = torch.tensor(float(adam["step"]))
        copies[RANKS] = torch.tensor(self._ranks if self._stage else 1)

        def write() -> None:
            path = file_of(folder / "deepspeed", self._rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(path, copies)

        return write

    def without_part(self, folder: Path) -> list[int]:
        """The ranks whose part of a checkpoint is not in `folder`, though they have written it."""
        ranks = range(self._ranks if self._stage else 1)
        return [rank for rank in ranks if not file_of(folder / "deepspeed", rank).exists()]

    def load(self, folder: Path) -> None:
        """Continue from what `capture` wrote, with any number of ranks and at any ZeRO stage: bit for bit with the same
        ones, else up to the rounding of sums over other ranks.

        Raises: ConfigError for a file that holds anything but tensors, is another model's, or is deleted meanwhile."""
        shapes = {name: torch.Size(getattr(p, "ds_shape", p.shape)) for name, p in self._trained.items()}
        try:
            self._take(SavedState(folder / "deepspeed", shapes))
        except SafetensorError as error:
            raise ConfigError(f"checkpoint {folder} is no learner's, or damaged: {first_line(error)}") from error
        except ValueError as error:
            raise ConfigError(f"checkpoint {folder} is not of this model.path: {first_line(error)}") from error
        except OSError as error:
            if is_sealed(folder):
                raise
            raise ConfigError(
                f"checkpoint {folder} was deleted meanwhile: another learner of this run is alive; start this one again"
            ) from error

    @torch.no_grad()
    def _take(self, saved: SavedState) -> None:
        """Put this rank's part into the optimizer, and the masters into the parameters."""
        states = self.deepspeed.basic_optimizer.state
        states.clear()
        for name, part in self._parts():
            if part.masters not in states:
                moments = {kind: torch.zeros_like(part.masters) for kind in MOMENTS}
                states[part.masters] = {"step": saved.updates.clone(), **moments}
            for kind in KINDS:
                self._held(part, kind).copy_(saved.elements(name, kind, part.start, part.length))
        for name, parameter in self._trained.items():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self.is_sharded):
                if self._rank == 0 or not self.is_sharded:
                    parameter.copy_(saved.whole(name, MASTER))


def settings_of(learner: LearnerConfig, dtype: str) -> dict[str, Any]:
    """DeepSpeed's config. Everything that it would otherwise default to something else is explicit.

    Raises: ConfigError for an option of learner.deepspeed that it does not know, or a value that it does not take."""
    given, fields = learner.deepspeed, DeepSpeedZeroConfig.model_fields
    known = [*fields, *(field.alias for field in fields.values() if field.alias)]
    refuse_unknown(
        "learner.deepspeed.zero_optimization", given.zero_optimization, known, f"DeepSpeed {deepspeed.__version__}"
    )
    zero = given.zero_optimization | {"stage": learner.zero_stage}
    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"learner.deepspeed.zero_optimization.{place}: {problem['msg']}") from error
    gradients = given.grad_accum_dtype
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": learner.grad_clip,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": learner.lr,
                "weight_decay": learner.weight_decay,
                "betas": [0.9, 0.999],
                "torch_adam": True,
                # One pass over masters and moments: on a CPU a tenth of the time. Only there: its rounding is another.
                **({"fused": True} if given.offload("offload_optimizer") == "cpu" else {}),
            },
        },
        "zero_force_ds_cpu_optimizer": False,  # its own Adam for offloading is compiled at the start
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": zero,
        **({"data_types": {"grad_accum_dtype": gradients}} if gradients else {}),
        **({"communication_data_type": given.communication_data_type} if given.communication_data_type else {}),
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
