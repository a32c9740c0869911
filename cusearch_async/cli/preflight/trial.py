"""Made-up episodes and a made-up pool, through a config's environments, rewards and method: what raises, or gives no
finite number, is seen before an engine is loaded."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cusearch_async.agents.conversation import Tools
from cusearch_async.agents.episode import AgentRunner
from cusearch_async.agents.parsing import Parsed, Parser
from cusearch_async.cli.preflight.finding import Finding, Status
from cusearch_async.config import Config, agents_token
from cusearch_async.data.questions import first_question
from cusearch_async.errors import ConfigError, CusearchError, first_line
from cusearch_async.rollout.prompting import encode
from cusearch_async.rollout.turn import Turn
from cusearch_async.streams import Stream, stream
from cusearch_async.training.selector import (
    advantages_of,
    candidates_of,
    initial_method_state,
    method_state,
    plan_groups,
    select,
)
from cusearch_async.types import Pool, Question, Trajectory

PATIENCE_S = 20.0


class _FindsNothing:
    async def search(self, query: str, seed: int, question: Question, ticket: int) -> list[str]:
        return []


class _Answers:
    """A policy whose every turn is the gold answer."""

    def __init__(self, tokenizer: Any, answer: str) -> None:
        self._ids = encode(tokenizer, f"<answer>{answer}</answer>{tokenizer.eos_token or ''}")

    async def generate(
        self, prompt: list[int], max_tokens: int, temperature: float, seed: int | None, stops: Sequence[str]
    ) -> Turn:
        ids = self._ids[:max_tokens]
        return Turn(ids, np.full(len(ids), -1.0, dtype=np.float32), np.zeros(len(ids), dtype=np.int32))


def _calls_one_tool(question: Question, counted: Sequence[str]) -> Parser:
    """For agents: reads a call of a tool, one of those that are `counted`, out of the first turn that is offered one,
    whatever the policy wrote, and then the answer without its tags. Texts that the tool asks for are the question."""
    has_called = False

    def parse(_: Sequence[int], written: str, tools: Tools) -> Parsed:
        nonlocal has_called
        if has_called or not tools:
            return Parsed(re.sub("</?answer>", "", written) if tools else written)
        has_called = True
        offered = [tool["function"] for tool in tools]
        function = next((one for one in offered if one["name"] in counted), offered[0])
        asked = function.get("parameters") or {}
        properties = asked.get("properties") or {}
        fields = {name: properties.get(name) or {} for name in asked.get("required") or ()}
        made_up = {name: _made_up(field, question.text) for name, field in fields.items()}
        return Parsed("", [(function["name"], json.dumps(made_up))])

    return parse


def _made_up(field: dict[str, Any], text: str) -> Any:
    """A value that a JSON schema allows, as far as its type tells."""
    if field.get("enum"):
        return field["enum"][0]
    kinds = {"integer": 1, "number": 1.0, "boolean": False, "array": [], "object": {}}
    return next((value for kind, value in kinds.items() if field.get("type") == kind), text)


def trial(config: Config, tokenizer: Any) -> Iterator[Finding]:
    """A finding for each environment, and one for the method. An episode whose question is not here is left out:
    another finding names that."""
    episodes = []
    every = sum(settings.share for settings in config.environment.values())
    for label, settings in config.environment.items():
        share = f"; {settings.share:g} of {every:g} tickets are its" if len(config.environment) > 1 else ""
        try:
            question = first_question(config, label)
        except ConfigError:
            continue
        what = f"environment.{label}"
        if getattr(settings, "remote", ""):
            yield _elsewhere(what, share)
            continue
        try:
            one = _episode(config, tokenizer, replace(question, environment=label))
            episodes.append(asyncio.run(asyncio.wait_for(one, PATIENCE_S)))
        except Exception as error:
            status: Status = "not reachable" if _is_of_a_service(error) else "error"
            yield Finding(status, what, f"a made-up episode failed: {_said(error)}")
        else:
            reward = f"{episodes[-1].reward:g}"
            yield Finding("ok", what, f"a made-up episode with the right answer has reward {reward}{share}")
    if episodes:
        yield _method(config, episodes)
    if ":" in config.loss.objective:
        yield _objective(config)


def refuse_failed_trial(config: Config, tokenizer: Any) -> None:
    """Raises: ConfigError for the first finding that is an error."""
    for finding in trial(config, tokenizer):
        if finding.status == "error":
            raise ConfigError(f"{finding.what}: {finding.text}")


def _elsewhere(what: str, share: str) -> Finding:
    try:
        agents_token()
    except ConfigError as error:
        return Finding("error", what, first_line(error))
    return Finding("ok", what, f"no made-up episode: its agents run elsewhere{share}")


async def _episode(config: Config, tokenizer: Any, question: Question) -> Trajectory:
    policy = _Answers(tokenizer, question.answers[0] if question.answers else "?")
    label, chat = question.environment, config.model.template_arguments
    environments = {label: config.environments(_FindsNothing())[label]}  # others may wait for programs elsewhere
    runner = AgentRunner(policy, environments, tokenizer, config.episode, config.run.seed, chat)
    counted = getattr(config.environment[label], "tools", ())
    runner.chat = replace(runner.chat, parsers={label: _calls_one_tool(question, counted)})
    return await runner.run(question, ticket=0, rollout=0, worker="check")


def _method(config: Config, episodes: Sequence[Trajectory]) -> Finding:
    """Of a pool of N groups with random depths and rewards."""
    rng = stream(Stream.SELECTION, config.run.seed, 0)
    s_max, name = config.episode.s_max, config.method.name
    pool = Pool(
        0,
        tuple(
            replace(
                episodes[ticket % len(episodes)],
                ticket=ticket,
                rollout=rollout,
                question_id=f"question {ticket}",
                depth=int(rng.integers(s_max + 1)),
                reward=float(rng.integers(2)),
            )
            for ticket in range(config.questions_per_step)
            for rollout in range(config.pool.rollouts)
        ),
    )
    try:
        method, candidates = config.method.make(), candidates_of(pool, s_max)
        state = initial_method_state(config.method, s_max)
        chosen = select(candidates, 0, method, method.decode(state.memory, s_max), config.method, config.run.seed)
        advantages_of(chosen.indices, candidates, 0, method, config.method)
        method_state(method, chosen.memory, {}, s_max)
        plan_groups(0, method, chosen.memory, "question {}".format, config.questions_per_step, config.pool)
    except Exception as error:
        return Finding("error", "method.name", f"{name} failed with a made-up pool: {_said(error)}")
    count = len(chosen.indices)
    text = f"{name} selects {count} of {len(pool)} made-up trajectories"
    return Finding("ok" if count else "warning", "method.name", text)


def _objective(config: Config) -> Finding:
    """Of four tokens with ratios about 1."""
    import torch  # noqa: PLC0415  (seconds)

    from cusearch_async.algorithm.shapes import require_vectors  # noqa: PLC0415
    from cusearch_async.learner.update import surrogate_of  # noqa: PLC0415

    ratio = torch.tensor([0.5, 1.0, 1.5, 1.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    try:
        settings = surrogate_of(config.loss)
        found = settings.objective(ratio, advantages, settings)
        if found is None:
            raise ValueError("it gave None")
        require_vectors(len(ratio), objective=found)
        if not found.isfinite().all():
            raise ValueError(f"it gave {found.tolist()}")
        torch.autograd.grad(found.sum(), ratio)
    except Exception as error:
        return Finding("error", "loss.objective", f"{config.loss.objective} failed with four tokens: {_said(error)}")
    return Finding("ok", "loss.objective", f"{config.loss.objective} gives each of four tokens a finite number")


def _is_of_a_service(error: BaseException) -> bool:
    """Whether it is of something that may not be there yet, such as a judge, or is slow."""
    cause = error.__cause__
    return isinstance(error, OSError | TimeoutError) or (cause is not None and _is_of_a_service(cause))


def _said(error: Exception) -> str:
    return first_line(error) if isinstance(error, CusearchError) else f"{type(error).__name__}: {first_line(error)}"
