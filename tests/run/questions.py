"""Three questions, and what may change of them while their file keeps its name."""

from __future__ import annotations

from dataclasses import replace

from cusearch_async.types import Question

QUESTIONS = [Question(id=f"q{i}", text=f"who {i}?", answers=("me",), category="x") for i in range(3)]
CHANGED = {
    "fewer": QUESTIONS[:2],
    "text": [*QUESTIONS[:2], replace(QUESTIONS[2], text="who?")],
    "answers": [*QUESTIONS[:2], replace(QUESTIONS[2], answers=("you",))],
    "id": [*QUESTIONS[:2], replace(QUESTIONS[2], id="q9")],
    "environment": [*QUESTIONS[:2], replace(QUESTIONS[2], environment="other")],
    "order": QUESTIONS[::-1],
}
