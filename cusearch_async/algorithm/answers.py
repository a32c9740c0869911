"""How right a predicted answer is. Source: the metrics of SQuAD, as Search-R1 computes them, and two additions.

Text in another script than Latin or Greek has its own rules, because SQuAD's give 0 there for almost everything: it is
compared in one Unicode form and without any punctuation, and where a script has no spaces between words, each character
is a word (as in MLQA's metric for Chinese). English text has SQuAD's scores.

The metric `strict` is for answers that SQuAD's metric takes for equal and that are not: numbers keep their signs,
points and other marks, so 3.5 is not 35 and -5 is not 5; and yes, no and noanswer must be the whole answer (as in
HotpotQA's metric). Unicode's rules above hold for all its text.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import regex

from cusearch_async.folding import UNSPACED, folded

Metric = Literal["squad", "strict"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NOT_LATIN = regex.compile(
    r"[[\p{L}\p{M}]--[\p{Latin}\p{Greek}\p{Common}\p{Inherited}]]"
    r"|[\p{Block=CJK_Symbols_and_Punctuation}\p{Block=Halfwidth_and_Fullwidth_Forms}]",
    regex.V1,
)
"""Greek letters are not looked for, because they occur in English ("β-carotene")."""
_MARK = rf"[\p{{P}}{re.escape(string.punctuation)}]"
_MARKS = regex.compile(_MARK)
_CHARACTER = regex.compile(rf"{UNSPACED}\p{{M}}*", regex.V1)

_EXPONENT = regex.compile(r"(?<=\d)(?=[²³¹⁰⁴-⁻])")
_FRACTION = regex.compile(r"(?<=\d)(?=[¼-¾⅐-⅞])")
_DASH = regex.compile(r"[\p{Pd}−]")
_NEGATIVE_PRICE = regex.compile(r"-(\p{Sc})(?=[\d.])")
_THOUSANDS = regex.compile(r"(?<![\d.,])\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d|,\d)")
_NUMBER_OR_MARK = regex.compile(rf"((?:(?<!\w)-?\.?)?\d+(?:{_MARK}+\d+)*)|{_MARK}")

_WHOLE_ANSWERS = frozenset({"yes", "no", "noanswer"})


def normalize_answer(text: str, metric: Metric = "squad", other: str = "") -> str:
    """Lower case, no punctuation, no articles, single spaces; in this order. Where a script has no spaces, each
    character is a word, and articles stay ("A型" is no article). `other` is the text that it is compared with: both
    have the rules of either's script."""
    keeps_articles = _CHARACTER.search(other) is not None
    if metric == "strict":
        text = _without_marks_outside_numbers(text)
    elif _NOT_LATIN.search(text) or _NOT_LATIN.search(other):
        text = _MARKS.sub("", folded(text))
    else:
        text = text.lower().translate(_PUNCTUATION)
    spaced, characters = _CHARACTER.subn(r" \g<0> ", text)
    return " ".join((spaced if characters or keeps_articles else _ARTICLES.sub(" ", text)).split())


def _pairs(prediction: str, answers: Sequence[str], metric: Metric) -> Iterator[tuple[str, str]]:
    """The prediction and each gold answer, normalised."""
    for answer in answers:
        yield normalize_answer(prediction, metric, answer), normalize_answer(answer, metric, prediction)


def exact_match(prediction: str, answers: Sequence[str], metric: Metric = "squad") -> float:
    """1.0 if the prediction equals any gold answer after normalisation. A blank one equals nothing."""
    return float(any(found and found == gold for found, gold in _pairs(prediction, answers, metric)))


def sub_exact_match(prediction: str, answers: Sequence[str], metric: Metric = "squad") -> float:
    """1.0 if the prediction contains any non-blank gold answer after normalisation; with `strict`, as whole words."""
    return float(any(_contains(found, gold, metric) for found, gold in _pairs(prediction, answers, metric)))


def _contains(found: str, gold: str, metric: Metric) -> bool:
    if not gold:
        return False
    if metric == "squad":
        return gold in found
    return gold == found or (not {gold, found} & _WHOLE_ANSWERS and f" {gold} " in f" {found} ")


def f1_score(prediction: str, answers: Sequence[str], metric: Metric = "squad") -> float:
    """Word-multiset F1 against the best gold answer, in [0, 1]."""
    return max((_f1(*pair, metric) for pair in _pairs(prediction, answers, metric)), default=0.0)


def _f1(prediction: str, answer: str, metric: Metric) -> float:
    if metric == "strict" and prediction != answer and {prediction, answer} & _WHOLE_ANSWERS:
        return 0.0
    found, gold = prediction.split(), answer.split()
    common = sum((Counter(found) & Counter(gold)).values())
    return 2 * common / (len(found) + len(gold)) if common else 0.0


def _without_marks_outside_numbers(text: str) -> str:
    """`text` folded, where only numbers keep their punctuation: between digits, and a sign or a point before them.
    Commas between thousands are left out.

    "(−1,200.50)" -> "-1200.50", "COVID-19." -> "covid19", "10⁵" -> "10^5", "2½" -> "2 1/2"."""
    text = _FRACTION.sub(" ", _EXPONENT.sub("^", text))  # NFKC would make 105 and 21/2 of them
    text = _DASH.sub("-", folded(text)).replace("⁄", "/")
    text = _NEGATIVE_PRICE.sub(r"\1-", text)
    text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    kept: str = _NUMBER_OR_MARK.sub(lambda found: found[1] or "", text)
    return kept
