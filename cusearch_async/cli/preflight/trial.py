"""Made-up episodes and a made-up pool, through a config's environments, rewards and method: what raises, or gives no
finite number, is seen before an engine is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cusearch_async.agents.episode import AgentRunner
from cusearch_async.cli.preflight.calls import OneCall, misread
from cusearch_async.cli.preflight.finding import Finding, Status
from cusearch_async.cli.preflight.patience import OtherLoop
from cusearch_async.config import Config
from cusearch_async.data.questions import first_question
from cusearch_async.environments import AgentEnvironment, Episode
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
from cusearch_async.types import Pool, Question, Segment, Trajectory

PATIENCE_S = 20.0


class _FindsNothing:
    async def search(self, query: str, seed: int, question: Question, ticket: int) -> list[str]:
        return []


class _Says:
    """A policy whose every turn is the same."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._ids = encode(tokenizer, f"{text}{tokenizer.eos_token or ''}")

    async def generate(
        self, prompt: list[int], max_tokens: int, temperature: float, seed: int | None, stops: Sequence[str]
    ) -> Turn:
        ids = self._ids[:max_tokens]
        return Turn(ids, np.full(len(ids), -1.0, dtype=np.float32), np.zeros(len(ids), dtype=np.int32))


def trial(config: Config, tokenizer: Any) -> Iterator[Finding]:
    """Findings for each environment, and one for the method. An episode whose question is not here is left out:
    another finding names that."""
    episodes: list[Trajectory] = []
    with OtherLoop(PATIENCE_S) as loop:
        for label, settings in config.environment.items():
            try:
                question = replace(first_question(config, label), environment=label)
            except ConfigError:
                continue
            if getattr(settings, "remote", ""):
                yield _elsewhere(config, label, tokenizer)
                continue
            try:
                tried = _Trial(config, tokenizer, question)
                episodes.append(loop.run(tried.with_answer()))
            except Exception as error:
                yield _failed(label, error)
            else:
                yield tried.right(episodes[-1])
                yield from tried.further(episodes[-1], loop)
            if loop.is_blocked:
                break
    if episodes:
        yield _method(config, episodes)
    if ":" in config.loss.objective:
        yield _objective(config)


class _Trial:
    """Of one environment."""

    def __init__(self, config: Config, tokenizer: Any, question: Question) -> None:
        self._config, self._question = config, question
        self._label = label = question.environment
        self._environment = config.environments(_FindsNothing())[label]
        self._is_agent = isinstance(self._environment, AgentEnvironment)
        answer = question.answers[0] if question.answers else "?"
        self._answer = answer if self._is_agent else f"<answer>{answer}</answer>"
        self._call = OneCall(question.text, getattr(config.environment[label], "tools", ()))
        environments = {label: self._environment}  # others may wait for programs elsewhere
        template, policy = config.model.template_arguments, _Says(tokenizer, self._answer)
        self._runner = AgentRunner(policy, environments, tokenizer, config.episode, config.run.seed, template)
        self._runner.chat = replace(self._runner.chat, parsers={label: self._call})

    async def with_answer(self) -> Trajectory:
        return await self._runner.run(self._question, ticket=0, rollout=0, worker="check")

    def right(self, episode: Trajectory) -> Finding:
        """Of an episode with the right answer."""
        what, reward = f"environment.{self._label}", episode.reward
        text = f"a made-up episode with the right answer has reward {reward:g}"
        if limits := self._runner.limits_met:
            return Finding("warning", what, f"{text}: it asked for more than {', '.join(limits)}, which ended it")
        if reward <= 0 and self._question.answers:
            text += f"; is the reward wrong, or an answer not written as {self._answer!r:.100}?"
            return Finding("warning", what, text)
        return Finding("ok", what, f"{text}{_share(self._config, self._label)}")

    def further(self, episode: Trajectory, loop: OtherLoop) -> Iterator[Finding]:
        method = self._config.method
        if abs(episode.reward) > 2 and method.singleton == "raw" and not method.make().uses_whole_pool:
            text = (
                f"'raw' takes a reward, {episode.reward:g} in environment.{self._label}, as the advantage of a "
                "trajectory that is alone in its group; use 'pool' or 'zero', or a reward between -1 and 1"
            )
            yield Finding("warning", "method.singleton", text)
        try:
            loop.run(self._without_answer())
        except Exception as error:
            yield _failed(self._label, error, " without an answer")
        own = self._environment.settings
        if self._call.tools and (why := misread(self._call, self._label, own, self._runner.chat)):
            text = f"{own.parser!r} may not be for the chat template of this model: {why}"
            yield Finding("warning", f"environment.{self._label}.parser", text)

    async def _without_answer(self) -> None:
        if self._is_agent:  # it has returned None
            said = [Segment("model", "?")]
            await self._environment.final_score(Episode(question=self._question, ticket=0, rollout=1, segments=said))
        else:
            self._runner.policy = _Says(self._runner.tokenizer, "?")
            await self._runner.run(self._question, ticket=0, rollout=1, worker="check")


def _share(config: Config, label: str) -> str:
    every = sum(settings.share for settings in config.environment.values())
    own = config.environment[label].share
    return f"; {own:g} of {every:g} tickets are its" if len(config.environment) > 1 else ""


def _failed(label: str, error: Exception, which: str = "") -> Finding:
    status: Status = "not reachable" if _is_of_a_service(error) else "error"
    return Finding(status, f"environment.{label}", f"a made-up episode{which} failed: {_said(error)}")


def refuse_failed_trial(config: Config, tokenizer: Any) -> None:
    """Raises: ConfigError for the first finding that is an error."""
    for finding in trial(config, tokenizer):
        if finding.status == "error":
            raise ConfigError(f"{finding.what}: {finding.text}")


def _elsewhere(config: Config, label: str, tokenizer: Any) -> Finding:
    what, arguments = f"environment.{label}", config.model.template_arguments
    try:
        own = {label: config.environment[label].make(_FindsNothing())}
        AgentRunner(_Says(tokenizer, ""), own, tokenizer, config.episode, config.run.seed, arguments)
    except ConfigError as error:
        return Finding("error", what, first_line(error))
    return Finding("ok", what, f"no made-up episode: its agents run elsewhere{_share(config, label)}")


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


_OF_FILES = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def _is_of_a_service(error: BaseException) -> bool:
    """Whether it is of something that may not be there yet, such as a judge, or is slow."""
    if isinstance(error, _OF_FILES):
        return False
    cause = error.__cause__
    return isinstance(error, OSError | TimeoutError) or (cause is not None and _is_of_a_service(cause))


def _said(error: Exception) -> str:
    return first_line(error) if isinstance(error, CusearchError) else f"{type(error).__name__}: {first_line(error)}"
