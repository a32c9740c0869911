"""The learner on DeepSpeed. The only module that knows it.

One `update` is one learner step: π_prox and π_ref for the selected trajectories, then mini-batches of M. The
result does not depend on how a mini-batch is split over ranks and micro-batches: every token's weight is fixed
for the whole mini-batch, gradients are summed, and only then does the optimizer step.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import deepspeed
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from cusearch_async.algorithm import losses
from cusearch_async.config import Config
from cusearch_async.models import load_tokenizer
from cusearch_async.rollout.dialogue import NOTICES
from cusearch_async.training import batching
from cusearch_async.training.model import SampledLogprobs, load_causal_lm, save_model
from cusearch_async.training.team import Team
from cusearch_async.transport import codec
from cusearch_async.transport.weights import Canary
from cusearch_async.types import Trajectory

CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean absolute difference of log-probabilities; bfloat16 rounding was seen to make 0.04 of a small model's."""


class _Order(msgspec.Struct):
    """What rank 0 tells the other ranks to do with it."""

    do: Literal["update", "gather", "canary", "save", "stop"]
    step: int = 0
    payloads: list[bytes] = []
    advantages: list[float] = []
    folder: str = ""


@dataclass(slots=True)
class _Sums:
    """Sums over sampled tokens of what the metrics average; added up over micro-batches and ranks."""

    values: torch.Tensor
    NAMES = (
        "tokens",
        "loss",
        "clipped",
        "kl_reference",
        "entropy",
        "weight",
        "weight_squared",
        "weight_bounded",
        "mismatch",
        "abs_difference",
    )

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.values[self.NAMES.index(name)] += value

    def __getitem__(self, name: str) -> float:
        return float(self.values[self.NAMES.index(name)])


class Learner:
    """Policy, reference and optimizer. Rank 0 calls the public methods; the other ranks `follow`."""

    def __init__(self, config: Config, team: Team) -> None:
        self._config = config
        self._team = team
        self._tokenizer = load_tokenizer(config.model.location)
        model = load_causal_lm(config.model.location, config.model.dtype)
        if config.learner.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._reference = SampledLogprobs(copy.deepcopy(model)) if config.loss.kl_coef > 0 else None
        self._hf_config = model.config
        self._module = SampledLogprobs(model)
        self._engine, *_ = deepspeed.initialize(
            model=self._module, model_parameters=self._module.parameters(), config=_deepspeed_config(config)
        )
        self._device = self._engine.device
        if self._reference is not None:
            self._reference.requires_grad_(False).eval().to(self._device)

    # --- rank 0 ---------------------------------------------------------------------------------------

    def update(self, selected: Sequence[Trajectory], advantages: NDArray[np.float64], step: int) -> dict[str, float]:
        """Train on `selected` with `advantages` [K_eff]; returns the metrics of the step."""
        payloads = [codec.encode(t) for t in selected] if self._team.size > 1 else []
        self._team.tell(msgspec.msgpack.encode(_Order("update", step, payloads, advantages.tolist())))
        return self._update(selected, advantages, step)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The policy's parameters by Hugging Face names, on the CPU, in the model's dtype.

        A tied LM head goes by its own name as well: an engine that packs its weights keeps the old one
        otherwise (vLLM on CPU does)."""
        self._team.tell(msgspec.msgpack.encode(_Order("gather")))
        return self._gather()

    def canary(self) -> Canary:
        """A fixed text and the policy's log-probabilities of it."""
        self._team.tell(msgspec.msgpack.encode(_Order("canary")))
        return self._canary()

    def save(self, folder: Path) -> None:
        """Write optimizer, masters and the Hugging Face model into `folder`, which must not exist."""
        self._team.tell(msgspec.msgpack.encode(_Order("save", folder=str(folder))))
        self._save(folder)

    def stop(self) -> None:
        self._team.tell(msgspec.msgpack.encode(_Order("stop")))

    # --- every rank -----------------------------------------------------------------------------------

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote. Called by every rank at the start."""
        self._engine.load_checkpoint(str(folder), tag="deepspeed")

    def follow(self) -> None:
        """The life of a rank other than 0: do what rank 0 says until it says stop."""
        while True:
            order = msgspec.msgpack.decode(self._team.listen(), type=_Order)
            if order.do == "update":
                selected = [codec.decode(payload) for payload in order.payloads]
                self._update(selected, np.array(order.advantages), order.step)
            elif order.do == "gather":
                self._gather()
            elif order.do == "canary":
                self._canary()
            elif order.do == "save":
                self._save(Path(order.folder))
            else:
                return

    def _update(self, selected: Sequence[Trajectory], advantages: NDArray[np.float64], step: int) -> dict[str, float]:
        loss_settings = self._config.loss
        rng = np.random.default_rng([self._config.run.seed, step, 1])
        parts = [part.tolist() for part in batching.minibatches(len(selected), loss_settings.minibatch, rng)]
        log_prox = self._score(self._engine, selected, parts)
        log_reference = self._score(self._reference, selected, parts) if self._reference is not None else {}
        weights = {
            row: losses.correction_weights(
                log_prox[row],
                selected[row].logprobs,
                loss_settings.correction,
                loss_settings.correction_low,
                loss_settings.correction_high,
            )
            for row in log_prox
        }
        sums = _Sums(torch.zeros(len(_Sums.NAMES), dtype=torch.float64))
        largest = self._count_mismatch(sums, selected, log_prox, weights)
        self._set_learning_rate(step)
        grad_norms = []
        for part in parts:
            self._train(part, selected, advantages, log_prox, log_reference, weights, sums)
            norm = self._engine.get_global_grad_norm()
            if norm is not None:  # DeepSpeed keeps none at ZeRO stage 0 in float32
                grad_norms.append(float(norm))
        self._team.sum(sums.values)
        return self._metrics(sums, grad_norms, largest, len(selected), len(parts))

    def _train(
        self,
        part: list[int],
        selected: Sequence[Trajectory],
        advantages: NDArray[np.float64],
        log_prox: dict[int, NDArray[np.float32]],
        log_reference: dict[int, NDArray[np.float32]],
        weights: dict[int, NDArray[np.float32]],
        sums: _Sums,
    ) -> None:
        """One optimizer step on one mini-batch."""
        settings = self._config.loss
        lengths = [len(selected[row].logprobs) for row in part]
        most = (self._config.episode.s_max + 1) * self._config.episode.max_turn_tokens
        share = dict(zip(part, losses.aggregation_weights(lengths, settings.aggregation, most), strict=True))
        for rows in self._own_micro_batches(part, selected):
            is_filler = not rows
            batch = batching.collate(selected, rows or part[:1], self._device)
            log_policy, entropy = self._engine(batch.token_ids, batch.sampled, self._config.episode.temperature)
            if is_filler:  # every rank must call backward equally often
                self._engine.backward(0.0 * log_policy.sum(), scale_wrt_gas=False)
                continue

            def spread(value_of: dict[int, float], rows: list[int] = rows) -> torch.Tensor:
                return self._flat([np.full(len(selected[row].logprobs), value_of[row], np.float32) for row in rows])

            loss, terms = losses.policy_loss(
                log_policy,
                self._flat([log_prox[row] for row in rows]),
                self._flat([log_reference[row] for row in rows]) if log_reference else None,
                spread({row: float(advantages[row]) for row in rows}),
                self._flat([weights[row] for row in rows]),
                spread(share),
                settings.clip_low,
                settings.clip_high,
                settings.kl_coef,
            )
            # DeepSpeed averages gradients over ranks; the weights already count the whole mini-batch.
            self._engine.backward(loss * self._team.size, scale_wrt_gas=False)
            sums.add(
                loss=float(loss.detach()),
                clipped=float(terms.clipped.sum()),
                kl_reference=float(terms.kl_reference.sum()),
                entropy=float(entropy.sum()),
            )
        self._engine.step()

    def _score(
        self, module: Any, selected: Sequence[Trajectory], parts: Sequence[list[int]]
    ) -> dict[int, NDArray[np.float32]]:
        """Log-probabilities [S] under `module` of the trajectories that this rank trains on."""
        scores: dict[int, NDArray[np.float32]] = {}
        for part in parts:
            for rows in self._own_micro_batches(part, selected):
                batch = batching.collate(selected, rows or part[:1], self._device)
                with torch.no_grad():
                    flat, _ = module(batch.token_ids, batch.sampled, self._config.episode.temperature)
                ends = np.cumsum([len(selected[row].logprobs) for row in rows])
                pieces = np.split(flat.float().cpu().numpy(), ends[:-1]) if rows else []
                scores.update(zip(rows, pieces, strict=True))
        return scores

    def _own_micro_batches(self, part: list[int], selected: Sequence[Trajectory]) -> list[list[int]]:
        """This rank's micro-batches of a mini-batch; empty ones fill up to the count of the busiest rank."""
        lengths = [len(selected[row].token_ids) for row in part]
        per_rank = []
        for rank in range(self._team.size):
            own = batching.share_of_rank(lengths, rank, self._team.size)
            groups = batching.micro_batches([lengths[i] for i in own], self._config.learner.micro_batch_tokens)
            per_rank.append([[part[own[i]] for i in group] for group in groups])
        most = max(len(groups) for groups in per_rank)
        mine = per_rank[self._team.rank]
        return mine + [[]] * (most - len(mine))

    def _flat(self, pieces: list[NDArray[np.float32]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(pieces)).to(self._device)

    @staticmethod
    def _count_mismatch(
        sums: _Sums,
        selected: Sequence[Trajectory],
        log_prox: dict[int, NDArray[np.float32]],
        weights: dict[int, NDArray[np.float32]],
    ) -> float:
        """Add what compares learner and sampling policy; returns the largest difference of log-probabilities."""
        largest = 0.0
        for row, log_p in log_prox.items():
            difference = (log_p - selected[row].logprobs).astype(np.float64)
            ratio = np.exp(np.clip(difference, -losses.MAX_LOG_RATIO, losses.MAX_LOG_RATIO))
            w = weights[row].astype(np.float64)
            sums.add(
                tokens=len(w),
                weight=w.sum(),
                weight_squared=(w * w).sum(),
                weight_bounded=float((np.abs(w - ratio) > 1e-6 * ratio).sum()),
                mismatch=(ratio - difference - 1).sum(),
                abs_difference=np.abs(difference).sum(),
            )
            largest = max(largest, float(np.abs(difference).max()))
        return largest

    def _metrics(
        self, sums: _Sums, grad_norms: list[float], largest: float, trajectories: int, optimizer_steps: int
    ) -> dict[str, float]:
        tokens = max(sums["tokens"], 1.0)
        squared = sums["weight_squared"]
        report = {"train/grad_norm": float(np.mean(grad_norms))} if grad_norms else {}
        return report | {
            "train/trajectories": float(trajectories),
            "train/tokens": sums["tokens"],
            "train/loss": sums["loss"] / max(optimizer_steps, 1),
            "train/optimizer_steps": float(optimizer_steps),
            "train/clip_fraction": sums["clipped"] / tokens,
            "train/kl_reference": sums["kl_reference"] / tokens,
            "train/entropy": sums["entropy"] / tokens,
            "train/lr": self._engine.optimizer.param_groups[0]["lr"],
            "off_policy/mismatch_kl": sums["mismatch"] / tokens,
            "off_policy/logprob_difference_mean": sums["abs_difference"] / tokens,
            "off_policy/logprob_difference_max": largest,
            "off_policy/weight_mean": sums["weight"] / tokens,
            "off_policy/weight_bounded_share": sums["weight_bounded"] / tokens,
            "off_policy/ess": sums["weight"] ** 2 / (tokens * squared) if squared else 0.0,
        }

    def _set_learning_rate(self, step: int) -> None:
        settings = self._config.learner
        warm = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
        for group in self._engine.optimizer.param_groups:
            group["lr"] = settings.lr * warm

    def _gather(self) -> dict[str, torch.Tensor]:
        """All parameters on rank 0; with ZeRO-3 they are collected one by one."""
        is_sharded = self._config.learner.zero_stage == 3
        tensors = {}
        for name, parameter in self._module.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=is_sharded):
                if self._team.is_leader:
                    tensors[name] = parameter.detach().to("cpu", copy=True)
        if self._team.is_leader and self._hf_config.tie_word_embeddings:
            embedding = "model.embed_tokens.weight"
            tensors.setdefault("lm_head.weight", tensors[embedding].clone())
        return tensors

    def _canary(self) -> Canary:
        ids = self._tokenizer(NOTICES["paper"], add_special_tokens=False)["input_ids"][
            : self._config.episode.max_tokens - 1
        ]
        token_ids = torch.tensor([ids], device=self._device)
        sampled = torch.ones_like(token_ids, dtype=torch.bool)
        sampled[0, 0] = False
        with torch.no_grad():
            logprobs, _ = self._engine(token_ids, sampled, 1.0)
        return Canary(ids, logprobs.float().cpu().tolist(), CANARY_TOLERANCE[self._config.model.dtype])

    def _save(self, folder: Path) -> None:
        tensors = self._gather()
        if self._team.is_leader:
            shutil.rmtree(folder, ignore_errors=True)
            save_model(self._module.model, tensors, self._tokenizer, folder / "model")
        self._engine.save_checkpoint(str(folder), tag="deepspeed", save_latest=False)


def _deepspeed_config(config: Config) -> dict[str, Any]:
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
