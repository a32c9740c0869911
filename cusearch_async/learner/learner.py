"""The learner: one `update` is one step of the policy.

π_prox and π_ref for the selected trajectories, then mini-batches of M, each for one optimizer step.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from cusearch_async.algorithm import losses
from cusearch_async.config import Config
from cusearch_async.errors import NonFiniteUpdate, WriteFailed, first_line
from cusearch_async.learner import matmul
from cusearch_async.learner.adapter import Adapter, save_adapter
from cusearch_async.learner.canary import canary_ids, canary_tolerance
from cusearch_async.learner.deepspeed_engine import DeepSpeedEngine, divided_forward
from cusearch_async.learner.interface import Lent
from cusearch_async.learner.model import (
    Reference,
    SampledLogprobs,
    as_in_files,
    compile_layers,
    load_causal_lm,
    recompute_layers,
    save_model,
    saved_tensors,
    tied_names,
    train_upper_layers,
    try_to_save,
    whole_reference,
)
from cusearch_async.learner.plan import MicroBatch, MiniBatch, plan_update
from cusearch_async.learner.ranks import Ranks
from cusearch_async.learner.suitability import refuse_other_models, refuse_unsuitable_policy
from cusearch_async.learner.update import LogProbs, Update, learning_rate, surrogate_of, to_backward
from cusearch_async.metrics.table import Metrics
from cusearch_async.metrics.update import UpdateReport
from cusearch_async.models import load_tokenizer
from cusearch_async.transport import codec
from cusearch_async.types import Trajectory
from cusearch_async.weights.interface import Canary


class Command(msgspec.Struct):
    """A command of rank 0 that all ranks execute together."""

    do: Literal["update", "score", "lend", "canary", "capture", "offload", "reload", "stop"]
    step: int = 0
    payloads: list[bytes] = []
    advantages: list[float] = []
    folder: str = ""
    is_finished: bool = False
    """With `stop`: the run is."""


class DeepSpeedLearner:
    """Policy, reference and optimizer. Rank 0 calls the public methods; the other ranks `follow`."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self._config = config
        self._ranks = ranks
        self._surrogate = surrogate_of(config.loss)
        self._tokenizer = load_tokenizer(config.model.location)
        model = load_causal_lm(config.model.location, config.model.dtype, config.learner.attention)
        try_to_save(model, self._tokenizer, config.model.location)
        matmul.use_fastest(model, config.learner)
        if config.learner.trained_layers:
            train_upper_layers(model, config.learner.trained_layers, config.model.location)
        lora, has_reference = config.learner.lora, config.loss.kl_coef > 0
        self._adapter = Adapter.into(model, lora, config.model.location, config.run.seed) if lora.rank else None
        is_copied = has_reference and self._adapter is None and config.learner.zero_stage < 3
        copied = copy.deepcopy(model) if is_copied else None
        self._module = SampledLogprobs(model, config.learner.logits_chunk_tokens, config.loss.entropy_coef > 0)
        refuse_unsuitable_policy(self._module, config.model.location, config.learner.packing)
        if config.learner.gradient_checkpointing:
            recompute_layers(model)
        if config.learner.compile:
            compile_layers(model, config.model.location)
        self._hf_config = model.config
        refuse_other_models(ranks, config.model.location)
        self._engine = DeepSpeedEngine(self._module, config.learner, config.model.dtype)
        self._device = self._engine.device
        self._lent = threading.Lock()
        """Of rank 0. Held while the parameters are lent, and while an optimizer step changes them."""
        self._was_lent = False
        """Since the last optimizer step."""
        self.waited_s = 0.0
        self._captures = 0
        self._reference = self._load_reference(copied) if has_reference else None

    def _load_reference(self, copied: Any) -> Reference:
        """The model without its adapter, `copied` from the policy, or loaded again and divided among the ranks."""
        if self._adapter is not None:
            return partial(self._adapter.without, self._engine)
        settings, model = self._config.learner, self._config.model
        reference = copied or load_causal_lm(model.location, model.dtype, settings.attention)
        if settings.compile:
            compile_layers(reference, model.location)
        module = SampledLogprobs(reference, settings.logits_chunk_tokens).requires_grad_(False)
        if copied is None:
            forward = divided_forward(module, settings, model.dtype)
            return lambda: nullcontext(forward)
        return whole_reference(module, self._device, settings.reference == "cpu")

    # --- rank 0 ---------------------------------------------------------------------------------------

    def update(self, selected: Sequence[Trajectory], advantages: NDArray[np.float64], step: int) -> Metrics:
        """Train on `selected` with `advantages` [K_eff]; returns the metrics of the step.

        Raises: NonFiniteUpdate when NaN or infinity came up; no optimizer step has then been made with it."""
        self._tell(Command("update", step, self._payloads(selected), advantages.tolist()))
        return self._update(selected, advantages, step)

    def mean_loss(self, trajectories: Sequence[Trajectory]) -> float:
        """Cross-entropy of the sampled tokens under the policy, in nats per token. Changes nothing."""
        self._tell(Command("score", payloads=self._payloads(trajectories)))
        return self._mean_loss(trajectories)

    def enter_thread(self) -> None:
        """CUDA's current device is a thread's own."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def lend(self) -> Lent:
        """The policy's tensors by the names of its files, or its adapter's by peft's, in the model's dtype: no copies;
        the next optimizer step waits until they are released. ZeRO-3 has collected copies.

        A tied LM head has both of its names: vLLM on a CPU, which packs its weights, keeps the old one otherwise."""
        self._tell(Command("lend"))
        tensors, adapter = self._published(), self._adapter.config if self._adapter else None
        if self._engine.is_sharded:
            return Lent(tensors, lambda: None, adapter)
        self._lent.acquire()
        return Lent(tensors, self._lent.release, adapter)

    def canary(self) -> Canary:
        """A fixed text and the policy's log-probabilities of it."""
        self._tell(Command("canary"))
        return self._canary()

    def capture(self, folder: Path) -> Callable[[], None]:
        """Copies optimizer, masters and the policy; the returned function writes them into `folder` on all ranks.
        It raises: OSError, RuntimeError; WriteFailed, which names another rank."""
        self._tell(Command("capture", folder=str(folder)))
        write = self._capture(folder)
        self._captures += 1
        number = self._captures

        def write_on_all_ranks() -> None:
            try:
                write()
            finally:  # whoever deletes the folder after a failure must be the last one in it
                failed = [failure for failure in self._ranks.wait_for_answers(f"written/{number}") if failure]
            if failed:
                raise WriteFailed("; ".join(failed))
            if strangers := self._engine.without_part(folder):
                raise WriteFailed(
                    f"rank {', '.join(map(str, strangers))} has written its part of the checkpoint elsewhere than in "
                    f"{folder}: run.folder must be one folder for all nodes, with its whole path"
                )

        return write_on_all_ranks

    def offload(self) -> None:
        """Move everything from the GPUs into the host's memory on every rank: engines have the GPUs until `reload`."""
        self._tell(Command("offload"))
        self._offload()

    def reload(self) -> None:
        """Undo `offload`."""
        self._tell(Command("reload"))
        self._engine.reload()

    def stop(self, is_finished: bool) -> None:
        """End `follow` on the other ranks."""
        self._tell(Command("stop", is_finished=is_finished))

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: token ids are below it."""
        return int(self._hf_config.vocab_size)

    def _payloads(self, trajectories: Sequence[Trajectory]) -> list[bytes]:
        """What the other ranks are sent of these, if there are any."""
        return [codec.encode(t) for t in trajectories] if self._ranks.size > 1 else []

    def _tell(self, command: Command) -> None:
        self._ranks.tell(msgspec.msgpack.encode(command))

    # --- every rank -----------------------------------------------------------------------------------

    def load(self, folder: Path) -> None:
        """Continue from what `capture` wrote. Called by every rank at the start. Raises: as `DeepSpeedEngine.load`."""
        self._engine.load(folder)

    def follow(self) -> bool:
        """The loop of a rank other than 0: execute the commands of rank 0 until `stop`; whether the run is finished."""
        plain: dict[str, Callable[[], object]] = {
            "lend": self._published,
            "canary": self._canary,
            "offload": self._offload,
            "reload": self._engine.reload,
        }
        while (command := msgspec.msgpack.decode(self._ranks.listen(), type=Command)).do != "stop":
            selected = [
                codec.decode(payload, self._config.episode.max_trajectory_tokens) for payload in command.payloads
            ]
            if command.do == "update":
                with suppress(NonFiniteUpdate):  # rank 0 raises it, too, and ends when it has told of it
                    self._update(selected, np.array(command.advantages), command.step)
            elif command.do == "score":
                self._mean_loss(selected)
            elif command.do == "capture":
                self._capture_and_write(Path(command.folder))
            else:
                plain[command.do]()
        return command.is_finished

    def _capture_and_write(self, folder: Path) -> None:
        """A frame that ends: what is written must not stay in memory until the next checkpoint."""
        self._captures += 1
        written = self._capture(folder), self._captures
        threading.Thread(target=self._write_and_answer, args=written).start()

    def _offload(self) -> None:
        self._engine.offload()
        self._ranks.gather("")  # rank 0 gives the GPUs of all back

    def _write_and_answer(self, write: Callable[[], None], number: int) -> None:
        failure = ""
        try:
            write()
        except Exception as error:  # rank 0 waits for the answer
            failure = f"rank {self._ranks.rank} cannot write its part of the checkpoint: {first_line(error)}"
        self._ranks.answer(f"written/{number}", failure)

    def _update(self, selected: Sequence[Trajectory], advantages: NDArray[np.float64], step: int) -> Metrics:
        plan = plan_update(selected, advantages, step, self._config, self._ranks.rank, self._ranks.size)
        update = Update(plan.to(self._device), self._config.loss, self._device)
        if self._config.loss.proximal == "recomputed":
            update.set_proximal(self._score(self._engine, update.to_score))
        if self._reference is not None:
            with self._reference() as reference:
                update.set_reference(self._score(reference, update.plan.micro_batches))
        report = UpdateReport(self._config.episode.s_max, self._device)
        lr = learning_rate(self._config, step)
        norms, self.waited_s = [], 0.0
        for minibatch in update.plan.minibatches:
            self._accumulate(minibatch, update, report)
            self._refuse_faults(update)
            before = time.monotonic()
            with self._lent:
                self.waited_s += time.monotonic() - before
                if self._was_lent:  # rank 0 may have waited for a slow disk
                    self._ranks.go()
                    self._was_lent = False
                norms.append(self._engine.step(lr))
        report.sums = self._ranks.sum(report.sums.cpu())
        report.largest = self._ranks.max(report.largest.cpu())
        tokens, computed, padded = self._ranks.sum(torch.tensor(plan.tokens(), dtype=torch.float64)).tolist()
        known = [norm for norm in norms if norm is not None]
        return {
            **report.metrics(len(norms)),
            **({"train/grad_norm": float(np.mean(known))} if known else {}),
            "train/trajectories": float(len(selected)),
            "train/computed_share": computed / max(tokens, 1),
            "train/padding_share": (padded - computed) / max(padded, 1),
            "train/lr": lr,
        }

    def _mean_loss(self, trajectories: Sequence[Trajectory]) -> float:
        nothing = np.zeros(len(trajectories))
        plan = plan_update(trajectories, nothing, 0, self._config, self._ranks.rank, self._ranks.size).to(self._device)
        scored = self._score(self._engine, plan.micro_batches)
        own = [log_probs.double().sum() for micro, log_probs in scored.items() if not micro.is_filler]
        nought = torch.zeros((), dtype=torch.float64, device=self._device)  # a rank may have fillers alone
        total = self._ranks.sum(torch.stack([*own, nought]).sum().cpu())
        return -float(total) / sum(t.sampled_tokens for t in trajectories)

    @torch.no_grad()
    def _score(self, module: Callable[..., Any], micro_batches: Sequence[MicroBatch]) -> LogProbs:
        """Log-probabilities under `module` of trajectories that this rank trains on."""
        return {micro: self._forward(module, micro, wants_entropy=False)[0] for micro in micro_batches}

    def _accumulate(self, minibatch: MiniBatch, update: Update, report: UpdateReport) -> None:
        """Add up the gradient of one mini-batch."""
        for micro in minibatch:
            with torch.set_grad_enabled(micro.has_gradient):
                log_policy, entropy = self._forward(self._engine, micro)
                tokens = update.tokens(micro, log_policy.detach())
                loss, terms = losses.policy_loss(log_policy, tokens, self._surrogate, entropy)
            if micro.has_gradient:
                self._engine.backward(to_backward(loss, log_policy, micro, self._ranks.size))
            if not micro.is_filler:
                report.add(micro.depth, tokens, terms, entropy.detach())

    def _forward(
        self, module: Callable[..., Any], micro: MicroBatch, wants_entropy: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies [T] of the sampled tokens of a micro-batch."""
        inputs, temperature = micro.inputs, self._config.episode.temperature
        of_each = module(inputs.token_ids, inputs.sampled, temperature, inputs.packed, wants_entropy)
        log_policy, entropy = (values[micro.computed] for values in of_each)
        return log_policy, entropy

    def _refuse_faults(self, update: Update) -> None:
        """Let no NaN or infinity reach the optimizer. Raises on every rank: NonFiniteUpdate, if one of them met any."""
        faults = [fault for fault in self._ranks.gather(update.faults(self._engine.gradient_square)) if fault]
        if faults:
            raise NonFiniteUpdate(
                f"step {update.plan.step} is refused, not finite: {', '.join(faults)}; no update was made with its "
                f"{update.made_of}"
            )

    def _published(self) -> dict[str, torch.Tensor]:
        """What workers load, on rank 0."""
        model, is_leader = self._module.model, self._ranks.is_leader
        self._was_lent = not self._engine.is_sharded
        if self._adapter is not None:
            trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
            return self._adapter.by_peft_names(self._engine.parameters(trained, keep=is_leader))
        tensors = self._engine.parameters(saved_tensors(model), keep=is_leader)
        if not is_leader:
            return tensors
        return as_in_files(model, tensors | {other: tensors[name] for other, name in tied_names(model).items()})

    def _canary(self) -> Canary:
        ids = canary_ids(self._tokenizer, self._config.episode.max_tokens)
        token_ids = torch.tensor([ids], device=self._device)
        sampled = torch.arange(1, len(ids), device=self._device)
        with torch.no_grad():
            logprobs, _ = self._engine(token_ids, sampled, 1.0, None, False)
        tolerance = canary_tolerance(self._config.model.dtype, self._device.type)
        return Canary(ids, logprobs.float().cpu().tolist(), tolerance)

    def _capture(self, folder: Path) -> Callable[[], None]:
        """Copy this rank's part; the returned function writes it. Parameters that are not trained need no copy, unless
        the GPU's memory is given back meanwhile; ZeRO-3 has collected copies."""
        adapter, stays, is_copied = self._adapter, not self._config.run.colocate, self._engine.is_sharded
        held = self._engine.parameters(saved_tensors(self._module.model), keep=self._ranks.is_leader)
        tensors = {
            name: tensor if is_copied or (stays and adapter and not adapter.owns(name)) else tensor.to("cpu", copy=True)
            for name, tensor in held.items()
        }
        write_engine = self._engine.capture(folder)

        def write() -> None:
            write_engine()
            if not self._ranks.is_leader:
                return
            if adapter:
                save_adapter(adapter, tensors, folder / "adapter")
            whole = adapter.merged(tensors) if adapter else tensors
            save_model(self._module.model, whole, self._tokenizer, folder / "model")

        return write
