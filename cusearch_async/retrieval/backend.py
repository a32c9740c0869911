"""The interface of search engines for the retriever process: queries in, scored passages out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from msgspec import Meta

Passage = dict[str, str]
"""One document: `id` and `contents` (quoted title, newline, text)."""
Scored = tuple[Passage, float]
OnProgress = Callable[[int, int], None]
"""Called with what is done, and the total."""


@dataclass(frozen=True, slots=True)
class Context:
    """The trajectory that searches, for a simulated engine (ZeroSearch)."""

    question: Annotated[str, Meta(pattern=r"\S")]
    answers: Annotated[tuple[str, ...], Meta(min_length=1)]
    step: Annotated[int, Meta(ge=0)]
    """Learner step of the weights that search; ZeroSearch's noise grows with it."""


@dataclass(frozen=True, slots=True)
class Query:
    text: str
    seed: int
    """The random number of this search: equal seeds give equal noise."""
    context: Context | None = None


class Backend(Protocol):
    @property
    def deterministic(self) -> bool:
        """Whether equal queries get equal documents, for every client and seed."""

    @property
    def accepts_seed(self) -> bool:
        """Whether the seed changes the documents or the latency, so that only a search with a seed is repeatable."""

    async def search(self, queries: Sequence[Query], topk: int) -> list[list[Scored]]:
        """For each query at most `topk` documents, best first; none when nothing is found. Raises: SearchFailed."""

    def figures(self) -> dict[str, str | int | float]:
        """Values for `/health` and `/metrics`, by name: numbers and short texts."""

    async def close(self) -> None: ...
