"""Demonstrations of the prose world for `cusearch warmstart`, by a teacher that searches the real index.

The teacher has the habits that reinforcement learning is to change: it mostly answers after its first search, also
where the question needs more, and sometimes asks the whole question again where the next entity is known. So its pupil
writes every kind of query, and some rollouts of a question are right and others wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from cusearch_async.atlas import prose
from cusearch_async.atlas.facts import Fact
from cusearch_async.atlas.questions import WORLDS, Chain, chains
from cusearch_async.retrieval.bm25 import Bm25Index

WORLD = WORLDS["atlas-prose"]
MOST_SEARCHES = 5
ASKS_WHOLE, ASKS_BRIEFLY = 0.1, 0.5
"""Share of searches that repeat the question, and that name relation and entity; the others ask for the next link."""
ANSWERS_AT_ONCE = 0.55
"""After the first link, where it is not the last."""
ANSWERS_WITHOUT = 0.05
"""After a search that has not found the next link: with the last thing known."""
SEARCHES_NEEDLESSLY = 0.1
"""Where the question tells what it asks for."""
SHARES = (0.06, 0.14, 0.25, 0.27, 0.28)
"""Of the demonstrations: those with so many links. Longer ones are harder to learn."""
NOT_FOUND = "This does not tell it."


class Teacher:
    def __init__(self, topk: int, seed: int) -> None:
        self._index = Bm25Index.in_memory(prose.passages())
        self._topk = topk
        self._rng = random.Random(seed)
        self._chains = chains("train", WORLD)

    def write(self, count: int) -> Iterator[dict[str, Any]]:
        """Rows of `warmstart.demonstrations`, of distinct questions."""
        drawn = []
        for needed, share in zip(WORLD.needed, SHARES, strict=True):
            some = [chain for chain in self._chains if len(chain.needed) == needed]
            drawn += self._rng.sample(some, min(len(some), math.ceil(count * share)))
        self._rng.shuffle(drawn)
        for chain in drawn[:count]:
            episode = _Episode(chain, self)
            episode.write()
            yield {
                "question": chain.text,
                "golden_answers": [chain.answer],
                "turns": episode.turns,
                "documents": episode.documents,
            }

    def search(self, query: str) -> list[str]:
        return [passage["contents"] for passage, _ in self._index.search([query], self._topk)[0]]

    def is_so(self, share: float) -> bool:
        return self._rng.random() < share

    def query(self, chain: Chain, fact: Fact, may_repeat: bool) -> str:
        drawn = self._rng.random()
        if may_repeat and drawn < ASKS_WHOLE:
            return chain.text
        if drawn < ASKS_WHOLE + ASKS_BRIEFLY:
            return fact.query
        return prose.asked(fact, self._rng)


class _Episode:
    def __init__(self, chain: Chain, teacher: Teacher) -> None:
        self._chain, self._teacher = chain, teacher
        self.turns: list[str] = []
        self.documents: list[list[str]] = []

    def write(self) -> None:
        chain, teacher = self._chain, self._teacher
        thought, known = "I have to search.", chain.city
        needed = list(chain.needed)
        if chain.is_first_given:
            thought, known = chain.facts[0].sentence, chain.facts[0].value
        if not needed and teacher.is_so(SEARCHES_NEEDLESSLY):
            needed = [chain.facts[0]]
        for fact in needed:
            if not self._find(fact, thought, known):
                return
            thought, known = fact.sentence, fact.value
            if fact != chain.facts[-1] and teacher.is_so(ANSWERS_AT_ONCE) and fact == needed[0]:
                break
        self.turns.append(f"<think>{thought}</think><answer>{known}</answer>")

    def _find(self, fact: Fact, thought: str, known: str) -> bool:
        """Search until the passage of `fact` is found; answer, and return False, where the teacher gives up."""
        teacher, may_repeat = self._teacher, True
        while len(self.documents) < MOST_SEARCHES:
            query = teacher.query(self._chain, fact, may_repeat)
            self.turns.append(f"<think>{thought}</think><search>{query}</search>")
            self.documents.append(teacher.search(query))
            if prose.passage_of(fact) in self.documents[-1]:
                return True
            thought, may_repeat = NOT_FOUND, False
            if teacher.is_so(ANSWERS_WITHOUT):
                break
        self.turns.append(f"<think>{thought}</think><answer>{known}</answer>")
        return False
