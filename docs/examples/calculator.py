"""A two-tool environment in one file: the search environment with a calculator.

    [environment.calculator]
    name = "docs.examples.calculator:Calculator"
    template = "atlas"

It brings its own questions over the facts of atlas, each of which needs both tools: "By how much does the number of
letters in the capital of Chile exceed the number of letters in the capital of Peru?"
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
import re
from collections.abc import Sequence
from dataclasses import replace

from cusearch_async.algorithm.answers import exact_match
from cusearch_async.atlas.facts import load_facts
from cusearch_async.environments import Episode, Observation, Quoted, Score, SearchEnvironment
from cusearch_async.environments.search import last_answer
from cusearch_async.types import Question

PROMPT = (
    "Answer the question. Look facts up with <search> query </search>, calculate with <calculate> 12 - 5 </calculate>, "
    "and give the number as <answer> 7 </answer>. Question: "
)
RESULT = Quoted("\n\n<result>", "", "</result>\n\n")
_CALL = re.compile(r"<calculate>((?:(?!<calculate>).)*?)</calculate>", re.DOTALL)
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class Calculator(SearchEnvironment):
    """Depth counts searches that found something and calculations that came out."""

    stops = (*SearchEnvironment.stops, "</calculate>")

    @property
    def fixed_texts(self) -> tuple[Quoted, ...]:
        return (*super().fixed_texts, RESULT)

    @classmethod
    def questions(cls) -> Sequence[Question]:
        facts = load_facts()
        capitals = {country: fact.value for country in facts.countries if (fact := facts.find("capital", country))}
        letters = {country: sum(map(str.isalpha, capital)) for country, capital in capitals.items()}
        return [
            Question(
                id=f"letters/{longer}/{shorter}",
                text=(
                    f"By how much does the number of letters in the capital of {longer} exceed the number of letters "
                    f"in the capital of {shorter}?"
                ),
                answers=(str(letters[longer] - letters[shorter]),),
                category="letters",
            )
            for longer, shorter in itertools.pairwise(sorted(capitals))
            if letters[longer] > letters[shorter]
        ]

    def prompt(self, question: Question) -> Quoted:
        return Quoted(PROMPT, question.text, "\n")

    async def step(self, episode: Episode, turn: str) -> Observation:
        call = _CALL.search(turn)
        if call is None:
            return await super().step(episode, turn)
        result = calculate(call[1])
        shown = "cannot be calculated" if result is None else f"{result:.10g}"
        return Observation(text=replace(RESULT, text=shown), author="result", counts=result is not None)

    async def score(self, episode: Episode) -> Score:
        prediction = last_answer(episode.segments)
        right = exact_match(prediction or "", episode.question.answers)
        return Score(reward=right, em=right, f1=right, prediction=prediction)


def calculate(expression: str) -> float | None:
    """The value of numbers, + - * / and brackets; None for anything else."""
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return None
    return value if math.isfinite(value) else None


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return float(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError(f"not an operation: {ast.dump(node)[:80]}")
