"""The columns of question files that are read, and the lists and objects that cells contain as text.

Names are case-insensitive. Text is JSON, Python's repr, or numpy's, as pandas writes it into CSV."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

QUESTION = ("question", "query")
"""Also extra_info.question, and the question in `prompt`."""
MODEL = "reward_model"
"""Its ground_truth is what Search-R1 and VERL score with."""
ANSWERS = (
    *("golden_answers", "golden_answer", "gold_answers", "gold_answer", MODEL),
    *("answers", "answer", "ground_truth", "possible_answers"),
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
"""Columns that are kept with the row's `metadata`."""
NEEDED = (
    "'question', 'extra_info' with a question, 'query' or 'prompt', and 'golden_answers', 'reward_model' or 'answer' "
    "(the schemas of Search-R1, VERL and BrowseComp-Plus)"
)
"""What a row must have, for messages."""
EVIDENCE = ("evidence_docs", "paragraphs", "supporting_facts", "context")
READ = {"prompt", "data_source", "extra_info", "metadata", "ability", *QUESTION, *ANSWERS, *IDS, *METADATA, *EVIDENCE}
"""And aliases. `ability` is written as in Search-R1, and not used."""

_QUOTED = re.compile(r"""(["'])\s*\[.*\]\s*\1""", re.DOTALL)
"""A list that was written as text twice."""
_STRING = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")(\s*(?=['"]))?""", re.DOTALL)
"""A string literal, and whether another follows it without a comma: Python would join the two into one."""
_NAMES = {"nan": None, "null": None, "true": True, "false": False}


@cache
def folded(name: str) -> str:
    """ "Golden Answers", "goldenAnswers" -> "golden_answers"."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[\s-]+", "_", words).lower()


@cache
def are_aliases(name: str) -> bool:
    """Whether the column with this folded name contains other spellings of the answer."""
    return _ALIASES.fullmatch(name) is not None


def is_read(name: str) -> bool:
    """Whether anything is read of the column."""
    return folded(name) in READ or are_aliases(folded(name))


def by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """The filled columns of a row by folded names; of two whose names differ only in that, the one that needs no
    folding counts."""
    filled = {name: value for name, value in values.items() if value is not None}
    exact = {name: value for name, value in filled.items() if name == folded(name)}
    return {folded(name): value for name, value in filled.items()} | exact


def shown(items: Collection[str], most: int = 20, separator: str = ", ") -> str:
    """The first of them, for a message."""
    return (separator.join(list(items)[:most]) or "none") + f"{separator}…" * (len(items) > most)


def read_literal(value: Any) -> Any:
    """The list or object that a text is; any other value, and a text that is none, as it is.

    "['a', 'b']", '["a", "b"]', "['a' 'b']" and "array(['a', 'b'], dtype=object)" -> ["a", "b"]; "(500)" and "('a')"
    stay text."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if _QUOTED.fullmatch(text):
        inner = _parsed(text)
        listed = read_literal(inner)
        return value if listed is inner else listed
    if text[:1] + text[-1:] not in ("[]", "{}", "()") and not text.startswith("array(["):
        return value
    found = _parsed(text)
    is_meant = text[0] != "(" or (isinstance(found, list) and all(isinstance(item, str) for item in found))
    return found if is_meant else value


def _parsed(text: str) -> Any:
    """The value of a literal; the text itself where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    with_commas = _STRING.sub(lambda found: found[1] + ("" if found[2] is None else ", "), text)
    try:
        return _value(ast.parse(with_commas, mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def _value(node: ast.expr) -> Any:
    """Raises: ValueError for what is no literal."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(ast.literal_eval(key or "")): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.Call(func=ast.Name(id="array"), args=[content]):
            return _value(content)
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case _:
            raise ValueError(f"{ast.dump(node):.80} is no literal")
