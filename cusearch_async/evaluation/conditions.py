"""The conditions of scores: the policy, the questions, and the settings that decide about scores besides these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from cusearch_async.config import Config
from cusearch_async.environments.templates import TEMPLATES
from cusearch_async.run.identity import fingerprint_of_questions
from cusearch_async.types import Question


def conditions(
    config: Config, model: str, questions: Sequence[Question], sampling: str, engine: str
) -> dict[str, str | int]:
    """By name, in the order in which they are printed. Scores are comparable where all but the model agree. `engine` is
    what was searched."""
    episode, environment = config.episode, config.environment[config.evaluated_in]
    vllm = config.rollout.vllm
    quantised = f", quantization {vllm.quantization}, KV cache {vllm.kv_cache_dtype}" if vllm.is_quantised else ""
    return {
        "model": full_name(model),
        "suite": suite_of(config),
        "questions": fingerprint_of_questions(questions),
        "seed": config.run.seed,
        "engine": engine,
        "k": config.retriever.topk,
        "S_max": episode.s_max,
        "turn_tokens": episode.max_turn_tokens,
        "observation_tokens": episode.max_observation_tokens,
        "prompt": _prompt(environment.template)
        + "".join(f", {name} = {value!r}" for name, value in config.model.chat_template.items())
        + ("" if config.model.uses_chat_template else ", no chat template"),
        **({} if environment.name == "search" else {"environment": environment.name}),
        **({"reward": environment.reward} if environment.reward else {}),
        **{name: repr(value) for name, value in environment.own.model_dump(mode="json").items()},
        "dtype": config.model.dtype + quantised,
        "sampling": sampling,
    }


def _prompt(template: str) -> str:
    """By its name, or how it begins, with a checksum: two may begin alike."""
    if template in TEMPLATES:
        return template
    return f"{template.splitlines()[0][:60]} ({xxhash.xxh3_64_hexdigest(template.encode())[:8]})"


def as_line(named: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in named.items())


def full_name(model: str) -> str:
    """The whole path of a model's folder, or its Hub id."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def suite_of(config: Config) -> str:
    return ", ".join(config.eval.suite or config.sources_of(config.evaluated_in))


def search_engine(config: Config, serves: str | None) -> str:
    """What the retriever at retriever.url `serves`, by its own report; None where it reports nothing."""
    if config.evaluated_in not in config.searching:
        return "none"
    return serves or f"the one at {config.retriever.url}"
