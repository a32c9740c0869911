"""The columns of question files that are read, by what they hold. Upper and lower case make no difference."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

QUESTION = ("question", "query")
"""Also extra_info.question, and what `prompt` asks."""
MODEL = "reward_model"
"""Its ground_truth is what Search-R1 and VERL score with."""
ANSWERS = (
    "golden_answers",
    "golden_answer",
    "gold_answers",
    "gold_answer",
    MODEL,
    "answers",
    "answer",
    "ground_truth",
    "possible_answers",
)
"""The first that a row has holds its gold answers; lists in the others, and in extra_info, add to them."""
_ALIASES = re.compile(
    r"(?:gold(?:en)?_)?(?:answers?_|o_|obj(?:ect)?_|target_)?alias(?:es)?|answers?_(?:variants|alternatives|synonyms)"
    r"|(?:alt|alternate|alternative|acceptable|accepted|additional)_answers?"
)
"""Other spellings of the gold answer: MuSiQue's `answer_aliases`, PopQA's `o_aliases` (of the object, not `s_aliases`
of the subject)."""
IDS = ("id", "_id", "query_id", "qid", "question_id", "idx", "index", "uid", "uuid", "example_id")
HOPS = ("hops", "n_hops", "num_hops", "hop")
METADATA = (*HOPS, "type", "level", "difficulty", "question_type", "question_decomposition")
"""What is kept of a row besides its `metadata`."""
EVIDENCE = ("evidence_docs", "paragraphs", "supporting_facts", "context")
READ = frozenset(
    {"prompt", "data_source", "extra_info", "metadata", "ability"}.union(QUESTION, ANSWERS, IDS, METADATA, EVIDENCE)
)
"""And aliases. `ability` is written as in Search-R1, and says nothing of a question."""
_SHOWN = 20


@cache
def folded(name: str) -> str:
    """ "Golden Answers", "goldenAnswers" -> "golden_answers"."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[\s-]+", "_", words).lower()


@cache
def are_aliases(name: str) -> bool:
    """Whether a folded name says that the column holds other spellings of the answer."""
    return _ALIASES.fullmatch(name) is not None


def is_read(name: str) -> bool:
    """Whether anything is read of the column with this folded name."""
    return name in READ or are_aliases(name)


def by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """The filled columns of a row by folded names; of two whose names differ only in that, the one that needs no
    folding counts."""
    filled = {name: value for name, value in values.items() if value is not None}
    exact = {name: value for name, value in filled.items() if name == folded(name)}
    return {folded(name): value for name, value in filled.items()} | exact


def shown(names: Collection[str]) -> str:
    """The first of them, for a message."""
    some = list(names)[:_SHOWN]
    return ", ".join(some) + ", …" * (len(names) > _SHOWN) if some else "none"


def unread(names: Iterable[str]) -> list[str]:
    """The columns of which nothing is read."""
    return sorted(name for name in names if not is_read(folded(name)))
