"""An episode that searches."""

from __future__ import annotations

from transformers import AutoTokenizer

from cusearch_async.config import EpisodeConfig
from cusearch_async.rollout.episode import EpisodeRunner
from tests.fakes import STARTER, ScriptedPolicy, searching
from tests.retrieval.retrievers import QUESTION

TOKENIZER = AutoTokenizer.from_pretrained(STARTER)


async def roll_out(client):
    turns = ["<think>a</think><search>capital of Peru</search>", "<think>b</think><answer>Lima</answer><|endoftext|>"]
    settings = EpisodeConfig(max_observation_tokens=88)
    runner = EpisodeRunner(ScriptedPolicy(TOKENIZER, turns), searching(client), TOKENIZER, settings, seed=0)
    return await runner.run(QUESTION, 0, 0, "w")
