"""The search environment: the policy thinks, searches at most S_max times, and answers.

Source: CuSearch, Fig. "Training template" and Eq. "reward"; the agent loop is Search-R1's, with the departures that
docs/algorithm.md lists.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from cusearch_async.algorithm.answers import Metric, exact_match, f1_score
from cusearch_async.environments.base import DONE, Environment, EnvironmentSettings, Episode, Observation, Score
from cusearch_async.environments.templates import Quoted
from cusearch_async.types import Segment

TAGS = tuple(f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/"))
THINK = "<think>"
_INNER = r"(?:(?!</?(?:think|search|information|answer)>).)*"
_TURN = re.compile(rf"\s*<think>{_INNER}</think>\s*<(search|answer)>({_INNER})</\1>\s*", re.DOTALL)
INFORMATION = Quoted("\n\n<information>", "", "</information>\n\n")


class SearchSettings(EnvironmentSettings):
    document_template: str = "Doc {rank}(Title: {title}) {text}\n"
    """search: one document of a result; {rank} counts from 1, {title} is its first line, {text} the rest."""
    format_weight: float = Field(0.2, ge=0, le=1)
    """search: λ_f, the weight of a valid format in the reward."""
    metric: Metric = "squad"
    """search: how rewards and evaluations compare answers. squad removes all punctuation, so that 3.5 equals 35; with
    strict, numbers keep their marks, and yes and no must be the whole answer."""

    @field_validator("document_template")
    @classmethod
    def _known_fields(cls, template: str) -> str:
        try:
            shown = template.format(rank=1, title="", text="a passage")
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(f"document_template may use {{rank}}, {{title}} and {{text}} only: {error!r}") from error
        if "a passage" not in shown:
            raise ValueError(f"document_template must have {{text}}, or no passage is seen, got {template!r}")
        return template


class SearchEnvironment(Environment):
    """Questions that are answered with a search engine. Depth is the number of searches that found a document."""

    Settings = SearchSettings
    settings: SearchSettings
    uses_retriever = True
    needs_answers = True
    stops: ClassVar[tuple[str, ...]] = ("</search>", "</answer>")

    @property
    def fixed_texts(self) -> tuple[Quoted, ...]:
        return (INFORMATION, Quoted(before=self.template.notice))

    async def step(self, episode: Episode, turn: str) -> Observation:
        action = parse_action(turn)
        if action.kind == "answer":
            return DONE
        if action.kind == "malformed":
            return Observation(text=Quoted(before=self.template.notice), author="notice")
        documents = (
            await self.search.search(action.text, episode.seed, episode.question, episode.ticket) if action.text else []
        )
        return Observation(text=self.show(documents), counts=any(document.strip() for document in documents))

    def show(self, documents: Sequence[str]) -> Quoted:
        """The information block of a search result."""
        shown = render_documents(documents, self.settings.document_template)
        return Quoted(INFORMATION.before, shown.strip() if self.template.strips_documents else shown, INFORMATION.after)

    async def score(self, episode: Episode) -> Score:
        settings, answers = self.settings, episode.question.answers
        weight, metric = settings.format_weight, settings.metric
        return score(episode.segments, answers, weight, episode.end_of_text, metric, episode.opening)


def score(
    segments: Sequence[Segment],
    answers: Sequence[str],
    format_weight: float,
    end_of_text: str = "",
    metric: Metric = "squad",
    opening: str = "",
) -> Score:
    """r(τ) = F1(τ) (1 - λ_f) + λ_f r_fmt(τ), computed only from the policy's own text, and for the format from a
    <think> that the prompt ends with (`opening`).

    Source: CuSearch, Eq. "reward". `format_weight` is λ_f (0.2 in the paper)."""
    prediction, f1, em = last_answer(segments), 0.0, 0.0
    if prediction is not None:
        f1, em = f1_score(prediction, answers, metric), exact_match(prediction, answers, metric)
    valid = is_format_valid(segments, end_of_text, opening)
    reward = f1 * (1 - format_weight) + format_weight * valid
    return Score(reward=reward, em=em, f1=f1, format_valid=valid, prediction=prediction)


@dataclass(frozen=True, slots=True)
class Action:
    kind: Literal["search", "answer", "malformed"]
    text: str
    """The query or the answer, stripped; may be empty."""


def block(*names: str) -> re.Pattern[str]:
    """A complete block of one of these tags: group 1 is the name, group 2 the content. If a tag is opened twice, the
    last opening counts."""
    return re.compile(rf"<({'|'.join(names)})>((?:(?!<\1>).)*?)</\1>", re.DOTALL)


_ACTION = block("search", "answer")
_ANSWER = block("answer")


def parse_action(turn: str) -> Action:
    """The action of a turn: its first complete search or answer block.

    "<think>..</think><search>capital of Peru</search>" -> Action("search", "capital of Peru")."""
    match = _ACTION.search(turn)
    if match is None:
        return Action("malformed", "")
    kind: Literal["search", "answer"] = "search" if match[1] == "search" else "answer"
    return Action(kind, match[2].strip())


def render_documents(documents: Sequence[str], template: str) -> str:
    """The content of an information block. A document's first line is its (quoted) title, the rest its text, as in
    Search-R1. If `template` has no {title}, a document with a single line is all text."""
    lines = []
    for rank, contents in enumerate(documents, start=1):
        title, newline, text = contents.partition("\n")
        if not newline and "{title" not in template:
            text = contents
        lines.append(template.format(rank=rank, title=title, text=text))
    return "".join(lines)


def last_answer(segments: Sequence[Segment]) -> str | None:
    """The last complete answer block within a turn of the policy; None if there is none."""
    blocks = [match[2] for s in segments if s.author == "model" for match in _ANSWER.finditer(s.text)]
    return blocks[-1].strip() if blocks else None


def is_format_valid(segments: Sequence[Segment], end_of_text: str = "", opening: str = "") -> bool:
    """Whether the response is think -> (search -> information -> think)* -> answer and nothing else.

    White space between blocks and one trailing `end_of_text` token are allowed. Where the end of the prompt (`opening`)
    has begun the first thought, the first turn continues it."""
    begun = THINK if opening.rstrip().endswith(THINK) else ""
    expected = "model"
    last_action = ""
    for segment in segments:
        if segment.author != expected or last_action == "answer":
            return False
        if segment.author == "information":
            expected = "model"
            continue
        text = segment.text.rstrip().removesuffix(end_of_text) if end_of_text else segment.text
        turn = _TURN.fullmatch(begun + text)
        begun = ""
        if turn is None:
            return False
        last_action = turn[1]
        expected = "information"
    return last_action == "answer"
