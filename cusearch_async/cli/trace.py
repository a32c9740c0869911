"""Episodes as an HTML page: what the policy wrote and what it was shown, turn by turn, each kind in its own colour."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any

from cusearch_async.types import Trajectory

MOST = 200
"""Most episodes on a page."""
_BLOCK = re.compile(r"<(think|search|answer|information)>(.*?)(</\1>|\Z)", re.DOTALL)


def stretches(trajectory: Trajectory, tokenizer: Any) -> list[tuple[str, str]]:
    """(author, text) in order: `prompt`, then alternately `model` and `environment`."""
    found = []
    place = 0
    for is_sampled, run_of in itertools.groupby(trajectory.sampled.tolist()):
        length = len(list(run_of))
        ids = trajectory.token_ids[place : place + length].tolist()
        author = "model" if is_sampled else "environment" if place else "prompt"
        found.append((author, tokenizer.decode(ids, skip_special_tokens=False)))
        place += length
    return found


def page(episodes: Sequence[Trajectory], tokenizer: Any, table: Sequence[Sequence[str]], title: str) -> str:
    """One self-contained HTML file. At most `MOST` episodes, evenly spaced."""
    step = max(1, -(-len(episodes) // MOST))
    shown = episodes[::step]
    template = (resources.files("cusearch_async.cli") / "trace.html").read_text(encoding="utf-8")
    header, *rows = ("".join(f"<td>{_cell(cell)}</td>" for cell in row) for row in table)
    return Template(template).substitute(
        title=html.escape(title),
        header=header,
        rows="".join(f"<tr>{row}</tr>" for row in rows),
        episodes="".join(_episode(number * step, t, tokenizer) for number, t in enumerate(shown)),
        shown=len(shown),
        count=len(episodes),
        depths="".join(f'<option value="{s}">{s}</option>' for s in sorted({t.depth for t in shown})),
    )


def _cell(text: str) -> str:
    """A table cell; an interval is not broken over lines."""
    return html.escape(text).replace(", ", ",&nbsp;")


def _episode(number: int, trajectory: Trajectory, tokenizer: Any) -> str:
    outcome = "right" if trajectory.em else "wrong"
    parts = "".join(_stretch(author, text) for author, text in stretches(trajectory, tokenizer))
    prediction = "no answer" if trajectory.prediction is None else trajectory.prediction
    summary = (
        f"F1 {trajectory.f1:.2f}, reward {trajectory.reward:.2f}, {trajectory.turns} turns, "
        f"{len(trajectory.logprobs)} tokens sampled, format {'valid' if trajectory.format_valid else 'not valid'}"
    )
    return (
        f'<details class="episode {outcome}" data-outcome="{outcome}" data-depth="{trajectory.depth}">'
        f'<summary><span class="mark">{"✓" if trajectory.em else "✗"}</span>'
        f'<span class="depth" title="searches">{trajectory.depth}</span>'
        f'<span class="question">{html.escape(trajectory.question)}</span>'
        f'<span class="answers">{html.escape(prediction)} <i>gold: {html.escape(" | ".join(trajectory.answers))}</i>'
        f"</span></summary><p>{number}: {html.escape(trajectory.question_id)}. {summary}</p>{parts}</details>"
    )


def _stretch(author: str, text: str) -> str:
    """Blocks are coloured by their tags, whoever wrote them. Other text has the colour of its author."""
    parts = []
    place = 0
    for block in _BLOCK.finditer(text) if author != "prompt" else ():
        parts.append(html.escape(text[place : block.start()]))
        parts.append(f'<span class="{block[1]}">{html.escape(block[0])}</span>')
        place = block.end()
    parts.append(html.escape(text[place:]))
    inside = "".join(parts).strip()
    return f'<div class="{author}">{inside}</div>' if inside else ""
