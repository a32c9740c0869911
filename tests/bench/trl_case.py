"""TRL's side of `make bench-learner`: python trl_case.py trl CASE.json, in an environment that has TRL.

GRPOTrainer trains on the recorded trajectories, as if it had just sampled them: it makes its own passes for the old and
the reference log-probabilities, its own padding, loss and optimizer steps. Tokens of the environment are masked by its
`tool_mask`. For each line on its input it makes one update, and prints the CPU seconds that it took.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from update_case import config_of, read_pool  # beside this script

ROWS = 32
"""Trajectories of a forward pass: 4, 8 and 16 were up to 3 % slower."""


class RecordedTrainer(GRPOTrainer):  # type: ignore[misc]
    """Takes `recorded` for what it has sampled."""

    recorded: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        batch = dict(self.recorded)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        arguments = (ids, mask, batch["completion_ids"].size(1), ROWS)
        with torch.no_grad():
            if self.args.gradient_accumulation_steps % self.args.steps_per_generation:
                batch["old_per_token_logps"] = self._get_per_token_logps_and_entropies(self.model, *arguments)[0]
            if self.beta:
                batch["ref_per_token_logps"] = self._get_per_token_logps_and_entropies(self.ref_model, *arguments)[0]
        return batch


class Clock(TrainerCallback):  # type: ignore[misc]
    """Waits for a line before each update, of `steps` optimizer steps, and answers with its CPU seconds."""

    def __init__(self, steps: int, answers: TextIO) -> None:
        self._steps, self._answers = steps, answers
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._steps == 0:
            if state.global_step and not sys.stdin.readline():
                control.should_training_stop = True
            self._began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._steps == 0:
            seconds = time.process_time() - self._began
            self._answers.write("ready\n" if state.global_step == self._steps else f"{seconds}\n")


def batch_of(selected: list[Any], advantages: Any) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, what follows on the right, as TRL has them."""
    firsts = [int(t.sampled.argmax()) for t in selected]
    before, after = max(firsts), max(len(t.token_ids) - first for t, first in zip(selected, firsts, strict=True))
    prompt_ids, prompt_mask = (torch.zeros(len(selected), before, dtype=torch.long) for _ in range(2))
    completion_ids, completion_mask, tool_mask = (torch.zeros(len(selected), after, dtype=torch.long) for _ in range(3))
    for row, (trajectory, first) in enumerate(zip(selected, firsts, strict=True)):
        ids, sampled = torch.tensor(trajectory.token_ids), torch.tensor(trajectory.sampled)
        rest = len(ids) - first
        prompt_ids[row, before - first :], prompt_mask[row, before - first :] = ids[:first], 1
        completion_ids[row, :rest], completion_mask[row, :rest] = ids[first:], 1
        tool_mask[row, :rest] = sampled[first:]
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": torch.tensor(advantages, dtype=torch.float32),
        "num_items_in_batch": tool_mask.sum(),
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to standard output
    torch.set_num_threads(1)
    case = json.loads(Path(sys.argv[2]).read_text())
    config = config_of(case)
    selected, advantages = read_pool(case["pool"], case["trajectories"])
    count, minibatch = len(selected), config.loss.minibatch
    with tempfile.TemporaryDirectory() as folder:
        trainer = RecordedTrainer(
            model=config.model.location,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            processing_class=AutoTokenizer.from_pretrained(config.model.location, padding_side="left"),
            train_dataset=Dataset.from_dict({"prompt": ["?"] * count}),
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=ROWS,
                gradient_accumulation_steps=minibatch // ROWS,
                steps_per_generation=count // ROWS,
                num_generations=2,
                max_steps=10**6,
                learning_rate=config.learner.lr,
                beta=config.loss.kl_coef,
                loss_type="bnpo",
                save_strategy="no",
                report_to="none",
                logging_steps=10**6,
                disable_tqdm=True,
            ),
        )
        trainer.recorded = batch_of(selected, advantages)
        trainer.add_callback(Clock(count // minibatch, answers))
        trainer.train()


if __name__ == "__main__":
    main()
