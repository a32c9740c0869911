"""Rewards, judged on what the model wrote and on nothing else.

r(τ) = F1(τ) (1 - λ_f) + λ_f r_fmt(τ).
Source: CuSearch, Eq. "reward"; text metrics as in SQuAD and Search-R1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cusearch_async.types import Segment

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_INNER = r"(?:(?!</?(?:think|search|information|answer)>).)*"
_TURN = re.compile(rf"\s*<think>{_INNER}</think>\s*<(search|answer)>({_INNER})</\1>\s*", re.DOTALL)


def block(*names: str) -> re.Pattern[str]:
    """A complete block of one of these tags: group 1 is the name, group 2 the inside. Of a tag that is opened twice
    the last opening counts. How turns are played and how they are judged both start from here."""
    return re.compile(rf"<({'|'.join(names)})>((?:(?!<\1>).)*?)</\1>", re.DOTALL)


_ANSWER = block("answer")


@dataclass(frozen=True, slots=True)
class Score:
    reward: float
    f1: float
    em: float
    format_valid: bool
    prediction: str | None


def normalize_answer(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces; in this order."""
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if the prediction equals any gold answer after normalisation. A blank one equals nothing."""
    found = normalize_answer(prediction)
    return float(bool(found) and any(found == normalize_answer(answer) for answer in answers))


def sub_exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if the prediction contains any non-blank gold answer after normalisation."""
    found = normalize_answer(prediction)
    golds = (normalize_answer(answer) for answer in answers)
    return float(any(gold and gold in found for gold in golds))


def f1_score(prediction: str, answers: Sequence[str]) -> float:
    """Token-multiset F1 against the best gold answer, in [0, 1]."""
    return max((_f1(normalize_answer(prediction), normalize_answer(answer)) for answer in answers), default=0.0)


def _f1(prediction: str, answer: str) -> float:
    found, gold = prediction.split(), answer.split()
    common = sum((Counter(found) & Counter(gold)).values())
    return 2 * common / (len(found) + len(gold)) if common else 0.0


def last_answer(segments: Sequence[Segment]) -> str | None:
    """The last complete answer block that the model itself wrote; None if there is none.

    Blocks are looked for within one turn: passages and the prompt can hold answer tags too."""
    blocks = [match[2] for s in segments if s.author == "model" for match in _ANSWER.finditer(s.text)]
    return blocks[-1].strip() if blocks else None


def is_format_valid(segments: Sequence[Segment], end_of_text: str = "") -> bool:
    """Whether the response is think -> (search -> information -> think)* -> answer and nothing else.

    White space between blocks and one trailing `end_of_text` token are fine."""
    expected = "model"
    last_action = ""
    for segment in segments:
        if segment.author != expected or last_action == "answer":
            return False
        if segment.author == "information":
            expected = "model"
            continue
        turn = _TURN.fullmatch(_without_end(segment.text, end_of_text))
        if turn is None:
            return False
        last_action = turn[1]
        expected = "information"
    return last_action == "answer"


def _without_end(text: str, end_of_text: str) -> str:
    return text.rstrip().removesuffix(end_of_text) if end_of_text else text


def score(segments: Sequence[Segment], answers: Sequence[str], format_weight: float, end_of_text: str = "") -> Score:
    """The reward of an episode. `format_weight` is λ_f (0.2 in the paper)."""
    prediction = last_answer(segments)
    f1 = f1_score(prediction, answers) if prediction is not None else 0.0
    em = exact_match(prediction, answers) if prediction is not None else 0.0
    valid = is_format_valid(segments, end_of_text)
    return Score(f1 * (1 - format_weight) + format_weight * valid, f1, em, valid, prediction)
