"""A language model that judges answers, in addition to exact match: for answers that are right in other words.

Off by default, and never a reward: a judge can be wrong, and can be manipulated. An episode without an answer is not
shown to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from cusearch_async.config import JudgeConfig, is_loopback, secret
from cusearch_async.errors import JudgeFailed, first_line, packages_of
from cusearch_async.types import Trajectory

with packages_of("eval"):
    from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient, OpenAIError, UnprocessableEntityError

KEY = "CUSEARCH_JUDGE_KEY"
"""Environment variable with the server's key, if it needs one."""
PROMPT = """Question: {question}
Right answers: {answers}
Given answer: {prediction}

Is the given answer one of the right answers, in whatever words? Answer with a single word, yes or no."""
_TRIAL = PROMPT.format(question="Which city is the capital of France?", answers="Paris", prediction="Paris")


@dataclass(frozen=True, slots=True)
class Verdicts:
    model: str
    prompt: str
    right: float
    agrees_with_em: float
    unreadable: float
    """Share of all episodes: the answer is neither yes nor no."""


async def try_judge(settings: JudgeConfig) -> None:
    """Ask an easy question, before any episode. Raises: JudgeFailed without a yes or no."""
    async with _client(settings) as client:
        answer = await _ask(client, settings, _TRIAL)
    if _verdict(answer) is None:
        raise JudgeFailed(
            f"the judge at eval.judge.url {settings.url} must answer yes or no, got {answer!r:.100}; give the URL of "
            "an OpenAI-compatible server, like http://127.0.0.1:8001/v1"
        )


async def judge(settings: JudgeConfig, episodes: Sequence[Trajectory]) -> Verdicts:
    """Ask for a verdict on each episode. Raises: JudgeFailed when the server fails, or no verdict can be read."""
    room = asyncio.Semaphore(settings.at_once)
    async with _client(settings) as client:

        async def one(episode: Trajectory) -> bool | None:
            text = PROMPT.format(
                question=episode.question, answers=" | ".join(episode.answers), prediction=episode.prediction
            )
            async with room:
                try:
                    return _verdict(await _ask(client, settings, text))
                except JudgeFailed as error:
                    if isinstance(error.__cause__, BadRequestError | UnprocessableEntityError):
                        return None  # too long, or filtered: there is no verdict on this one
                    raise

        shown = [number for number, episode in enumerate(episodes) if (episode.prediction or "").strip()]
        async with asyncio.TaskGroup() as tasks:
            asked = {number: tasks.create_task(one(episodes[number])) for number in shown}
    found = {number: task.result() for number, task in asked.items()}
    if shown and all(verdict is None for verdict in found.values()):
        raise JudgeFailed(f"the judge {settings.model} answers neither yes nor no for any of {len(shown)} answers")
    verdicts = [(found.get(number, False), bool(episode.em)) for number, episode in enumerate(episodes)]
    read = [(is_right, em) for is_right, em in verdicts if is_right is not None]
    return Verdicts(
        model=settings.model,
        prompt=PROMPT,
        right=sum(is_right for is_right, _ in read) / len(read),
        agrees_with_em=sum(is_right == em for is_right, em in read) / len(read),
        unreadable=1 - len(read) / len(episodes),
    )


def _client(settings: JudgeConfig) -> AsyncOpenAI:
    key = secret(KEY) or "none"
    is_here = is_loopback(settings.url or "")  # no proxy of the environment reaches that
    client = DefaultAsyncHttpxClient(trust_env=False) if is_here else None
    return AsyncOpenAI(
        base_url=settings.url, api_key=key, timeout=settings.timeout_s, max_retries=3, http_client=client
    )


async def _ask(client: AsyncOpenAI, settings: JudgeConfig, text: str) -> str:
    try:
        answer = await client.chat.completions.create(
            model=settings.model, messages=[{"role": "user", "content": text}], temperature=0.0
        )
    except (OpenAIError, ValueError) as error:  # ValueError: half an answer
        raise JudgeFailed(f"the judge at eval.judge.url {settings.url} fails: {first_line(error)}") from error
    try:
        return answer.choices[0].message.content or ""
    except (AttributeError, IndexError, TypeError):  # a web page, or JSON of another protocol
        return str(answer)


def _verdict(answer: str) -> bool | None:
    """After a reasoning model's thoughts; None for neither."""
    word = answer.rpartition("</think>")[2].strip().strip("*.!").lower()
    return {"yes": True, "no": False}.get(word)
