"""Supervised episodes of the atlas worlds, from which their starter policies learn to search and to read.

A starter must write the right next query, and read the right value off a passage, so that reinforcement learning has
only depth to learn: to continue to the end of a chain, and stop there. Where a turn may search or answer, that choice
is one token, and is taught as a distribution over the two; the traces themselves continue. Most traces have their
entities renamed to random syllables, so that the model copies and does not remember."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cusearch_async.atlas.facts import Fact, Facts
from cusearch_async.atlas.questions import WORLDS, Chain, World, chains
from cusearch_async.environments.templates import ATLAS
from cusearch_async.retrieval.bm25 import Bm25Index

RENAMED_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Style:
    """How the policy of a world writes, and with which probability it answers where it might search on."""

    world: World
    openings: tuple[str, ...]
    remarks: tuple[str, ...]
    """After what was read off a passage."""
    queries: tuple[str, ...]
    """Ways to ask for a fact, of {relation} and {entity}."""
    not_found: float
    """Share of searches that return only distractors; the trace then notes it and searches again."""
    verified: float
    """Share of chains whose last link is searched for once more, although it is known."""
    answers_at_once: float | None
    """Before the first search; None where the traces never do."""
    answers_after_link: float
    """After a link that is not the last."""
    answers_after_nothing: float | None
    """After a search that found nothing of use."""
    answers_at_end: float | None
    """When the answer is known."""

    @property
    def stops(self) -> tuple[float, ...]:
        found = (self.answers_at_once, self.answers_after_link, self.answers_after_nothing, self.answers_at_end)
        return tuple(sorted({stop for stop in found if stop is not None}))


PLAIN = Style(
    world=WORLDS["atlas"],
    openings=("Let me search.",),
    remarks=("",),
    queries=("{relation} of {entity}",),
    not_found=0.05,
    verified=0.0,
    answers_at_once=None,
    answers_after_link=0.6,
    answers_after_nothing=None,
    answers_at_end=None,
)
HARD = Style(
    world=WORLDS["atlas-hard"],
    openings=("Let me search.", "Let me look.", "I will search.", "I will look.", "First, a search."),
    remarks=("", " Good.", " I see."),
    queries=("{relation} of {entity}", "{entity} {relation}"),
    not_found=0.15,
    verified=0.15,
    answers_at_once=0.02,
    answers_after_link=0.7,
    answers_after_nothing=0.2,
    answers_at_end=0.97,
)
STYLES = {style.world.name: style for style in (PLAIN, HARD)}


@dataclass(frozen=True, slots=True)
class Passage:
    text: str
    author: Literal["environment", "policy"]
    stop: float | None = None
    """With which probability the policy is taught to answer here, and else to search; None where it is not asked."""


class TraceWriter:
    """Writes supervised episodes over the train split, as the agent loop would lay them out."""

    def __init__(self, facts: Facts, style: Style, rng: random.Random) -> None:
        self.style = style
        self._rng = rng
        self._chains = chains("train", style.world)
        self._facts = list(facts.by_query.values())
        self._names = sorted({f.entity for f in self._facts} | {f.value for f in self._facts})
        found = Bm25Index.in_memory(facts.passages()).search([fact.query for fact in self._facts], topk=4)
        self._results = {
            (fact.relation, fact.entity): [self._facts[int(p["id"])] for p, _ in results]
            for fact, results in zip(self._facts, found, strict=True)
        }

    def write(self) -> list[Passage]:
        """One trace: prompt, then per link search and passages, then the answer."""
        chain = self._rng.choice(self._chains)
        name = self._renaming() if self._rng.random() < RENAMED_SHARE else (lambda entity: entity)
        trace = [Passage(ATLAS.text.format(question=self._question(chain, name)), "environment")]
        thought, stop = self._rng.choice(self.style.openings), self.style.answers_at_once
        known = chain.facts[: chain.is_first_given]
        if known:
            thought, stop = self._read(chain, known[-1], name)
        for fact in chain.needed:
            trace += self._look_up(fact, thought, stop, name)
            thought, stop = self._read(chain, fact, name)
        if self._rng.random() < self.style.verified:
            trace += self._look_up(chain.facts[-1], thought, stop, name)
            thought, stop = self._read(chain, chain.facts[-1], name)
        answer = f"<think>{thought}</think><answer>{name(chain.answer)}</answer>"
        return [*trace, Passage(answer, "policy", stop)]

    def _question(self, chain: Chain, name: Callable[[str], str]) -> str:
        """As `Chain.text`, with other names."""
        first, given = chain.facts[0], ""
        if chain.is_first_given:
            given = self._sentence(first, name) + " "
        return given + chain.text.removeprefix(f"{first.sentence} ").replace(chain.city, name(chain.city))

    def _read(self, chain: Chain, fact: Fact, name: Callable[[str], str]) -> tuple[str, float | None]:
        """The thought after the passage of `fact` was found, and whether to answer then."""
        style = self.style
        stop = style.answers_at_end if fact == chain.facts[-1] else style.answers_after_link
        return self._sentence(fact, name) + self._rng.choice(style.remarks), stop

    def _look_up(self, fact: Fact, thought: str, stop: float | None, name: Callable[[str], str]) -> list[Passage]:
        """Searches for a fact, until its passage is found."""
        trace: list[Passage] = []
        while True:
            query = self._rng.choice(self.style.queries).format(relation=fact.relation, entity=name(fact.entity))
            trace.append(Passage(f"<think>{thought}</think><search>{query}</search>", "policy", stop))
            results = self._observe(fact)
            shown = "".join(self._sentence(result, name) + "\n" for result in results)
            trace.append(Passage(f"\n\n<information>{shown}</information>\n\n", "environment"))
            if fact in results:
                return trace
            thought, stop = "Not found.", self.style.answers_after_nothing

    def _observe(self, fact: Fact) -> list[Fact]:
        """The results of a search for `fact`: its passage among up to two others, now and then not at all."""
        others = [f for f in self._results[fact.relation, fact.entity] if f != fact]
        if self._rng.random() < 0.3:
            others = self._rng.sample(self._facts, 3)
        if self._rng.random() < self.style.not_found:
            return [f for f in others if f != fact][: self._rng.randint(1, 2)]
        results = [fact, *others[: self._rng.randint(0, 2)]]
        if self._rng.random() < 0.5:
            self._rng.shuffle(results)
        return results

    @staticmethod
    def _sentence(fact: Fact, name: Callable[[str], str]) -> str:
        return f"The {fact.relation} of {name(fact.entity)} is {name(fact.value)}."

    def _renaming(self) -> Callable[[str], str]:
        """A fresh random name for every entity, of about the same length, the same at every mention."""
        given: dict[str, str] = {}

        def rename(entity: str) -> str:
            if entity not in given:
                given[entity] = self._scrambled(self._rng.choice(self._names))
            return given[entity]

        return rename

    def _scrambled(self, name: str) -> str:
        """`name` with its letters drawn again; length, spaces, capitals and accents stay plausible."""
        letters = "aeioubcdfghjklmnprstvwyzaeiouaeiouáéíóúñöşāī"

        def draw(match: re.Match[str]) -> str:
            letter = self._rng.choice(letters)
            return letter.upper() if match[0].isupper() else letter

        return re.sub(r"[^\W\d_]", draw, name)
