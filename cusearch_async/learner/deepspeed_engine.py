"""The policy, its optimizer and their checkpoints on DeepSpeed. The only module that imports it."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from cusearch_async.config import Config, refuse_unknown
from cusearch_async.errors import ConfigError, first_line
from cusearch_async.learner.divided_state import KINDS, MASTER, MOMENTS, SavedState, pieces
from cusearch_async.learner.interface import is_sealed
from cusearch_async.learner.ranks import group_timeout

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# A CPU all-reduce that is compiled at start-up behind a lock file: a learner that is killed meanwhile leaves the lock,
# and every later one would wait for it without end. Gloo does the same work.

_WRITTEN_BY_DEEPSPEED = [ZeroStageEnum, LossScaler, fragment_address]
"""What a checkpoint of its optimizers holds besides tensors and plain values."""


class _OneByOne(nn.Module):
    """`module`, whose parameters get memory of their own only when they are asked for.

    transformers maps a model's file into memory. DeepSpeed writes what rank 0 has into every parameter before it
    divides it, and each page of a file that is written to would stay until the last tensor of that file is gone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in super().parameters(recurse):
            parameter.data = parameter.data.clone()
            yield parameter


def divide(module: nn.Module, settings: dict[str, Any]) -> None:
    """Divide the parameters among the ranks (ZeRO-3) one by one, so that no rank ever holds a whole model; DeepSpeed by
    itself would move it to the device first."""
    deepspeed.zero.Init(module=_OneByOne(module), config_dict_or_path=settings)


def divided_forward(module: nn.Module, config: Config) -> Callable[..., Any]:
    """The forward pass of a `module` that is divided and not trained. Its parameters are gathered layer by layer, from
    the host's memory if they wait there."""
    zero = {
        key: value for key, value in settings_of(config)["zero_optimization"].items() if not key.startswith("offload")
    }
    if config.learner.reference == "cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    settings = {key: value for key, value in settings_of(config).items() if key != "optimizer"}
    settings["zero_optimization"] = zero
    divide(module, settings)
    engine, *_ = deepspeed.initialize(model=module, config=settings)
    return cast(Callable[..., Any], engine)


class DeepSpeedEngine:
    """`module` with its optimizer. Every rank makes the same calls in the same order."""

    def __init__(self, module: nn.Module, config: Config) -> None:
        self._stage = config.learner.zero_stage
        self._is_sharded = self._stage == 3
        if self._is_sharded:
            divide(module, settings_of(config))
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self.deepspeed, *_ = deepspeed.initialize(
            model=module, model_parameters=self._trained.values(), config=settings_of(config)
        )
        self.deepspeed.checkpoint_engine.load = _load_tensors
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        # DeepSpeed makes a group of its own, with the time-out that torch has by default
        _set_pg_timeout(group_timeout(config.learner.collective_timeout_s), self.deepspeed.data_parallel_group)
        self.device: torch.device = self.deepspeed.device
        self.gradient_square = torch.zeros((), device=self.device)
        """Finite as long as all gradients since the last optimizer step, and their norm, are."""
        for parameter in self._trained.values():
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

    def parameters(self, named: Iterable[tuple[str, torch.Tensor]], keep: bool) -> dict[str, torch.Tensor]:
        """The parameters and buffers `named`, a part of the module's, on ranks that `keep` them, else nothing. The next
        optimizer step changes them, except with ZeRO-3: then they are collected one by one, and copied to the CPU."""
        tensors = {}
        for name, parameter in named:
            with deepspeed.zero.GatheredParameters([parameter], enabled=self._is_sharded):
                if keep:
                    live = parameter.detach()
                    tensors[name] = live.to("cpu", copy=True) if self._is_sharded else live
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

    def capture(self, folder: Path) -> Callable[[], None]:
        """Copies all that a checkpoint in `folder` needs of this rank. What is returned writes it, in any thread."""
        captured: dict[Path, Any] = {}

        def keep(state_dict: Any, path: str) -> None:
            captured[Path(path)] = _to_cpu(state_dict, {})

        self.deepspeed.checkpoint_engine.save = keep
        self.deepspeed.save_checkpoint(
            str(folder), tag="deepspeed", save_latest=False, exclude_frozen_parameters=bool(self._frozen)
        )
        return lambda: write(captured)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, with any number of ranks and at any ZeRO stage: bit for bit with the same
        ones, else up to the rounding of sums over other ranks.

        Raises: ConfigError for a file that holds anything but tensors and plain values, or is deleted meanwhile."""
        shapes = {name: torch.Size(getattr(p, "ds_shape", p.shape)) for name, p in self._trained.items()}
        saved = SavedState(folder / "deepspeed", _map_tensors, shapes)
        try:
            if saved.stage == self._stage and saved.ranks == (self._ranks if self._stage else 1):
                strict = not self._frozen  # what is frozen is in no checkpoint
                self.deepspeed.load_checkpoint(str(folder), tag="deepspeed", load_module_strict=strict)
            else:
                self._divide_again(saved)
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

    @torch.no_grad()
    def _divide_again(self, saved: SavedState) -> None:
        """Take this rank's part of what other ranks saved, or the same ones at another stage."""
        optimizer = self.deepspeed.optimizer
        own = optimizer.state_dict()
        if self._stage != 3:  # which casts the masters itself
            for name, parameter in self._trained.items():
                parameter.copy_(saved.whole(name, MASTER))
        if self._stage == 0:
            optimizer.load_state_dict(self._undivided(own, saved))
            return
        masters = own["fp32_flat_groups"] if self._stage == 3 else optimizer.single_partition_of_fp32_groups
        groups = {kind: [torch.zeros_like(group, device="cpu") for group in masters] for kind in KINDS}
        self._fill(groups, saved)
        adam = own["optimizer_state_dict" if self._stage == 3 else "base_optimizer_state"]
        moments = zip(*(groups[kind] for kind in MOMENTS), strict=True)
        adam["state"] = {
            number: {"step": saved.updates.clone(), **dict(zip(MOMENTS, tensors, strict=True))}
            for number, tensors in enumerate(moments)
        }
        if self._stage == 3:
            own["fp32_flat_groups"] = groups[MASTER]
        else:
            own["single_partition_of_fp32_groups"] = optimizer._get_groups_without_padding(groups[MASTER])
        optimizer.load_state_dict([own] * self._ranks, load_from_fp32_weights=True)

    def _fill(self, groups: dict[str, list[torch.Tensor]], saved: SavedState) -> None:
        """Put this rank's pieces of all parameters into its flat groups."""
        names = list(self._trained)
        lengths = [saved.shapes[name].numel() for name in names]
        sizes = [group.numel() for group in groups[MASTER]]
        for name, piece in zip(names, pieces(lengths, self._stage, self._rank, self._ranks, sizes), strict=True):
            for kind in KINDS if piece.length else ():
                part = saved.whole(name, kind).flatten()[piece.start : piece.start + piece.length]
                groups[kind][piece.group][piece.offset : piece.offset + piece.length] = part

    def _undivided(self, own: dict[str, Any], saved: SavedState) -> dict[str, Any]:
        """The optimizer's state of stage 0."""
        names = list(self._trained)
        adam = own.get("optimizer_state_dict", own)
        adam["state"] = {
            number: {"step": saved.updates.clone(), **{kind: saved.whole(name, kind).clone() for kind in MOMENTS}}
            for number, name in enumerate(names)
        }
        if "fp32_groups" in own:
            own["fp32_groups"] = [[saved.whole(name, MASTER) for name in names]]
        return own


def _map_tensors(path: Path) -> Any:
    """As `_load_tensors`, read from the disk only where it is looked at."""
    with torch.serialization.safe_globals(_WRITTEN_BY_DEEPSPEED):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def write(captured: Mapping[Path, Any]) -> None:
    """Write every state to its file. Raises: OSError, RuntimeError."""
    for path, state in captured.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # closing the archive fails too, and tells of a wrong position
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise


def _to_cpu(value: Any, copies: dict[Any, torch.Tensor]) -> Any:
    """A copy of `value`, its tensors on the CPU. Tensors that are the same memory stay so: a file holds them once."""
    if isinstance(value, torch.Tensor):
        memory = value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
        if memory not in copies:
            copies[memory] = value.detach().to("cpu", copy=True)
        return copies[memory]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _to_cpu(inner, copies)) for key, inner in value.items())
    if type(value) in (list, tuple):
        return type(value)(_to_cpu(inner, copies) for inner in value)
    return copy.deepcopy(value)


def _load_tensors(path: str, map_location: Any = None) -> Any:
    """In place of DeepSpeed's own, which unpickles: whoever can write into the run's folder could run code here."""
    with torch.serialization.safe_globals(_WRITTEN_BY_DEEPSPEED):
        return torch.load(path, map_location=map_location, weights_only=True)


def settings_of(config: Config) -> dict[str, Any]:
    """DeepSpeed's config. Everything that it would otherwise default to something else is explicit.

    Raises: ConfigError for an option of learner.deepspeed that it does not know."""
    settings, given = config.learner, config.learner.deepspeed
    refuse_unknown(
        "learner.deepspeed.zero_optimization",
        given.zero_optimization,
        _zero_options(),
        f"DeepSpeed {deepspeed.__version__}",
    )
    gradients = given.grad_accum_dtype
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
                # One pass over masters and moments: on a CPU a tenth of the time. Only there: its rounding is another.
                **({"fused": True} if given.offload("offload_optimizer") == "cpu" else {}),
            },
        },
        "zero_force_ds_cpu_optimizer": False,  # its own Adam for offloading is compiled at the start
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "zero_optimization": given.zero_optimization | {"stage": settings.zero_stage},
        **({"data_types": {"grad_accum_dtype": gradients}} if gradients else {}),
        **({"communication_data_type": given.communication_data_type} if given.communication_data_type else {}),
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def _zero_options() -> list[str]:
    """Names of DeepSpeedZeroConfig in a config, where some go by an alias."""
    fields = DeepSpeedZeroConfig.model_fields
    return [*fields, *(field.alias for field in fields.values() if field.alias)]
