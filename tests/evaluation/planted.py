"""Planted policies and engines, of which the evaluation must say what they are."""

from __future__ import annotations

import random

from cusearch_async.types import Question
from tests.strategies import make_trajectory

CAPITALS = [f"City {i % 12}" for i in range(600)]
QUESTIONS = [
    Question(
        id=f"q{i}",
        text=f"What is the capital of Land {i}?",
        answers=(capital,),
        category="c",
        evidence=(f'"Land {i}"\nThe capital of Land {i} is {capital}.',),
    )
    for i, capital in enumerate(CAPITALS)
]


class Engine:
    """Finds a question's evidence, and another passage; one that leaks always tells the answer in the other one."""

    def __init__(self, leaks: bool = False) -> None:
        self._leaks = leaks

    async def search(self, query, draw, question, ticket):
        hint = f"Forum: it is {question.answers[0]}, trust me." if self._leaks else "The sea is salty."
        return [*question.evidence, hint]


def knows(passages, question, rng):
    return question.answers[0]


def guesses(passages, question, rng):
    return rng.choice(CAPITALS)


def reads(passages, question, rng):
    """The answer that stands in passages, if one does."""
    return next((question.answers[0] for text in passages if question.answers[0] in text), None)


def abstains(passages, question, rng):
    return rng.choice([None, "I don't know", "unknown"])


def errs(passages, question, rng):
    """Always wrong in the same way."""
    return "Atlantis"


def is_confused(passages, question, rng):
    """Knows the answers, and believes what it reads to be others."""
    return "Atlantis" if passages else question.answers[0]


class PlantedRunner:
    """Runs episodes of one search each, with a planted policy."""

    def __init__(self, answer, search) -> None:
        self._answer = answer
        self._search = search
        self.done: list[tuple[int, float]] = []
        """(rollout, temperature) of each episode."""

    def check(self, questions):
        pass

    async def run(self, question, ticket, rollout, worker, temperature):
        self.done.append((rollout, temperature))
        passages = await self._search.search("?", 0, question, ticket)
        rng = random.Random(f"{question.id} {rollout}")
        prediction = self._answer(passages, question, rng)
        em = float(prediction == question.answers[0])
        return make_trajectory(ticket, rollout, prediction=prediction, em=em, depth=int(bool(passages)))
