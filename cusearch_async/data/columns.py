"""The columns of question files that are read, by what they hold. Upper and lower case make no difference."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

QUESTION = ("question", "query")
"""Also extra_info.question, and what `prompt` asks."""
MODEL = "reward_model"
"""Its ground_truth is what Search-R1 and VERL score with."""
ANSWERS = ("golden_answers", MODEL, "answers", "answer", "possible_answers")
"""The first that a row has holds its gold answers; lists in the others, and in extra_info, add to them."""
ALIASES = (
    "answer_aliases",
    "answers_aliases",
    "aliases",
    "alias",
    "o_aliases",
    "golden_aliases",
    "acceptable_answers",
    "accepted_answers",
    "alternative_answers",
    "other_answers",
)
"""Other spellings of the gold answer: MuSiQue's `answer_aliases`, PopQA's `o_aliases` (aliases of the object)."""
IDS = ("id", "_id", "query_id", "qid", "question_id", "idx", "index", "uid", "uuid", "example_id")
HOPS = ("hops", "n_hops", "num_hops", "hop")
METADATA = (*HOPS, "type", "level", "difficulty", "question_type", "question_decomposition")
"""What is kept of a row besides its `metadata`."""
EVIDENCE = ("evidence_docs", "paragraphs", "supporting_facts", "context")
READ = frozenset(
    {"prompt", "data_source", "extra_info", "metadata", "ability"}.union(
        QUESTION, ANSWERS, ALIASES, IDS, METADATA, EVIDENCE
    )
)
"""`ability` is written as in Search-R1, and says nothing of a question."""
_SHOWN = 20


def folded(name: str) -> str:
    """ "Golden Answers" -> "golden_answers"."""
    return name.strip().lower().replace(" ", "_").replace("-", "_")


def by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """A row by folded names; of two columns whose names differ only in that, the one that needs no folding counts."""
    return {folded(name): value for name, value in values.items()} | {
        name: value for name, value in values.items() if name == folded(name)
    }


def shown(names: Collection[str]) -> str:
    """The first of them, for a message."""
    some = list(names)[:_SHOWN]
    return ", ".join(some) + ", …" * (len(names) > _SHOWN) if some else "none"


def unread(names: Iterable[str]) -> list[str]:
    """The columns of which nothing is read."""
    return sorted(name for name in names if folded(name) not in READ)
