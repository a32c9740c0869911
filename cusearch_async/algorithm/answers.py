"""How right a predicted answer is. Source: the metrics of SQuAD, as Search-R1 computes them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


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
