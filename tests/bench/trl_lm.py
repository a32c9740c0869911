"""TRL's side of `make bench-lm`: python trl_lm.py CASE.json, in an environment that has TRL.

GRPOTrainer trains the warm-started model on the same questions, with the same retriever, episodes, reward and settings,
on the same cores, as it runs on a CPU: sampling with transformers' `generate`, then an update, in turns. What is
computed in bfloat16 it computes so, too, under autocast, with float32 weights. It ends when the case's seconds are
over, and leaves a model folder at every `every_s` of them; OUTPUT/saved.jsonl has a line for each.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from update_case import config_of  # beside this script

from cusearch_async.data.questions import load_run_questions
from cusearch_async.learner.model import train_upper_layers
from cusearch_async.models import check_model
from cusearch_async.retrieval.client import SearchClient
from cusearch_async.rollout.episode import EpisodeRunner
from cusearch_async.rollout.turn import Turn

ROWS = 8
"""Trajectories of a forward pass."""


class Generating:
    """A policy that samples the turns of all episodes in flight together, when the last of them asks for one."""

    def __init__(self, tokenizer: Any, temperature: float) -> None:
        self.model: Any = None
        self._tokenizer, self._temperature = tokenizer, temperature
        self._waiting: list[tuple[list[int], int, asyncio.Future[Turn]]] = []
        self._episodes = 0

    async def run(self, episodes: Sequence[Awaitable[Any]]) -> list[Any]:
        """Their results."""
        self._episodes = len(episodes)
        return await asyncio.gather(*map(self._ended, episodes))

    async def _ended(self, episode: Awaitable[Any]) -> Any:
        found = await episode
        self._episodes -= 1
        self._sample_if_all_wait()
        return found

    async def generate(self, prompt: list[int], most: int, temperature: float, seed: int | None, stops: Any) -> Turn:
        turn: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.append((list(prompt), most, turn))
        self._stops = list(stops)
        self._sample_if_all_wait()
        return await turn

    def _sample_if_all_wait(self) -> None:
        if not self._waiting or len(self._waiting) < self._episodes:
            return
        asked, self._waiting = self._waiting, []
        padded = self._tokenizer.pad({"input_ids": [prompt for prompt, _, _ in asked]}, return_tensors="pt")
        with torch.no_grad():
            found = self.model.generate(
                **padded,
                max_new_tokens=asked[0][1],
                do_sample=True,
                temperature=self._temperature,
                top_k=0,
                top_p=1.0,
                stop_strings=self._stops,
                tokenizer=self._tokenizer,
            )
        for row, (_, most, turn) in zip(found[:, padded["input_ids"].size(1) :].tolist(), asked, strict=True):
            ids = self._sampled(row)
            zeros = np.zeros(len(ids))
            turn.set_result(Turn(ids, zeros.astype(np.float32), zeros.astype(np.int32), len(ids) == most))

    def _sampled(self, row: list[int]) -> list[int]:
        """Without the padding after a turn's end."""
        end = self._tokenizer.eos_token_id
        ids = row[: row.index(end)] if end in row else row
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return ids if any(stop in text for stop in self._stops) else row[: len(ids) + 1]


class Clock(TrainerCallback):  # type: ignore[misc]
    """Saves the model at every `every_s` seconds of training, and ends it after `seconds`. Saving is not counted."""

    def __init__(self, case: dict[str, Any], tokenizer: Any) -> None:
        self._output, self._every_s, self._seconds = Path(case["output"]), case["every_s"], case["seconds"]
        self._tokenizer = tokenizer
        self._saved, self._not_counted = 0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        now = time.monotonic()
        passed = now - self._began - self._not_counted
        print(f"step {state.global_step}: {passed:.0f} s", flush=True)
        if passed < (self._saved + 1) * self._every_s:
            return
        self._saved += 1
        folder = self._output / f"step-{state.global_step}"
        model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        with (self._output / "saved.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, "seconds": passed, "model": str(folder)}) + "\n")
        control.should_training_stop = passed >= self._seconds
        self._not_counted += time.monotonic() - now


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    config = config_of(case)
    tokenizer = check_model(config.model.location, config.episode.max_tokens)
    tokenizer.padding_side = "left"
    questions, pool = load_run_questions(config), config.pool.size
    policy = Generating(tokenizer, config.episode.temperature)

    async def roll_out(tickets: list[int]) -> list[Any]:
        settings = (config.retriever, config.episode, config.questions_per_step)
        async with SearchClient.open(*settings) as search:
            environments, chat = config.environments(search), config.model.template_arguments
            runner = EpisodeRunner(policy, environments, tokenizer, config.episode, config.run.seed, chat)
            episodes = [
                runner.run(questions.of(ticket), ticket, row % config.pool.rollouts, "trl")
                for row, ticket in enumerate(tickets)
            ]
            return await policy.run(episodes)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        policy.model = trainer.accelerator.unwrap_model(trainer.model)
        policy.model.eval()
        found = asyncio.run(roll_out([int(prompt) for prompt in prompts]))
        policy.model.train()
        firsts = [int(t.sampled.argmax()) for t in found]
        of_each = list(zip(found, firsts, strict=True))
        return {
            "prompt_ids": [t.token_ids[:first].tolist() for t, first in of_each],
            "completion_ids": [t.token_ids[first:].tolist() for t, first in of_each],
            "logprobs": None,
            "env_mask": [t.sampled[first:].astype(int).tolist() for t, first in of_each],
            "reward": [t.reward for t in found],
        }

    trainer = GRPOTrainer(
        model=config.model.location,
        reward_funcs=lambda completions, reward, **_: reward,
        processing_class=tokenizer,
        rollout_func=rollout,
        train_dataset=Dataset.from_dict({"prompt": [str(n) for n in range(config.pool.questions * config.run.steps)]}),
        args=GRPOConfig(
            output_dir=case["output"],
            use_cpu=True,
            bf16=config.model.dtype == "bfloat16",
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=pool // ROWS,
            num_generations=config.pool.rollouts,
            shuffle_dataset=False,
            num_train_epochs=100,
            learning_rate=config.learner.lr,
            lr_scheduler_type="constant",
            weight_decay=config.learner.weight_decay,
            max_grad_norm=config.learner.grad_clip,
            beta=config.loss.kl_coef,
            seed=config.run.seed,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
        ),
    )
    if config.learner.trained_layers:
        train_upper_layers(trainer.model, config.learner.trained_layers, config.model.location)
    trainer.add_callback(Clock(case, tokenizer))
    trainer.train()


if __name__ == "__main__":
    main()
