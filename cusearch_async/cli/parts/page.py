"""Episodes as an HTML page: what the policy wrote and what it was shown, turn by turn, each kind in a colour."""

from __future__ import annotations

import html
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any

import numpy as np

from cusearch_async.types import Trajectory

MOST = 200
"""Most episodes on a page."""
UNSELECTED = "not selected"
_PAIR = re.compile(r"<([A-Za-z][\w.-]{0,30})>.*?</\1>", re.DOTALL)
_SEARCH_R1 = ("think", "search", "information", "answer")
"""Tags with colours that do not depend on what else is on the page."""
_OTHER_COLOURS = 6
"""Colours for the tags of other environments."""

Stretches = list[tuple[str, str]]


def spans(trajectory: Trajectory) -> Iterator[tuple[str, list[int]]]:
    """(author, token ids) in order: `prompt`, then alternately `model` and `environment`."""
    place = 0
    for is_sampled, run_of in itertools.groupby(trajectory.sampled.tolist()):
        length = len(list(run_of))
        author = "model" if is_sampled else "environment" if place else "prompt"
        yield author, trajectory.token_ids[place : place + length].tolist()
        place += length


def stretches(trajectory: Trajectory, tokenizer: Any) -> Stretches:
    """The same as text."""
    return [(author, tokenizer.decode(ids, skip_special_tokens=False)) for author, ids in spans(trajectory)]


def page(episodes: Sequence[Trajectory], tokenizer: Any, table: Sequence[Sequence[str]], title: str) -> str:
    """One self-contained HTML file. At most `MOST` episodes: the wrong ones, then right ones, each evenly spaced."""
    numbers = _spread(episodes)
    shown = [episodes[number] for number in numbers]
    texts = [stretches(trajectory, tokenizer) for trajectory in shown]
    colours = _colours(texts)
    parts = "".join(_episode(*those, colours) for those in zip(numbers, shown, texts, strict=True))
    counted = f"All {len(episodes)} episodes."
    if len(shown) < len(episodes):
        wrong, of_wrong = (sum(not t.em for t in some) for some in (shown, episodes))
        counted = f"{len(shown)} of {len(episodes)} episodes, with {wrong} of the {of_wrong} wrong ones."
    return _filled(parts, shown, counted, table, title, colours)


def _spread(episodes: Sequence[Trajectory]) -> list[int]:
    """Numbers of the episodes to show, ascending."""
    chosen: list[int] = []
    for is_right in (False, True):
        numbers = [number for number, t in enumerate(episodes) if bool(t.em) is is_right]
        step = -(-len(numbers) // max(1, MOST - len(chosen)))
        chosen += numbers[:: max(1, step)] if len(chosen) < MOST else []
    return sorted(chosen)


def group_page(
    trajectories: Sequence[Trajectory],
    advantages: Mapping[int, float],
    tokenizer: Any,
    table: Sequence[Sequence[str]],
    title: str,
) -> str:
    """One self-contained HTML file of a pool, the trajectories of a group side by side, first the groups that taught
    most: by the sum of |advantage|. `advantages` are those of the selected ones, by their places in the pool; the
    others are pale."""
    parts = []
    texts = [stretches(trajectory, tokenizer) for trajectory in trajectories]
    colours = _colours(texts)
    by_ticket = itertools.groupby(range(len(trajectories)), key=lambda number: trajectories[number].ticket)
    groups = [list(numbers) for _, numbers in by_ticket]
    taught = [sum(abs(advantages.get(number, 0.0)) for number in group) for group in groups]
    for place in np.argsort(-np.array(taught), kind="stable").tolist():
        cards = ""
        for number in groups[place]:
            note = f"A {advantages[number]:+.2f}" if number in advantages else UNSELECTED
            cards += _episode(number, trajectories[number], texts[number], colours, note)
        first = trajectories[groups[place][0]]
        gold = html.escape(" | ".join(first.answers))
        kinds = "group taught" if taught[place] else "group"
        parts.append(
            f'<section class="{kinds}"><h2>{first.ticket}: {html.escape(first.question)} <i>gold: {gold}</i></h2>'
            f'<div class="siblings">{cards}</div></section>'
        )
    counted = f"{len(trajectories)} episodes; the groups with the largest |A| first."
    return _filled("".join(parts), trajectories, counted, table, title, colours)


def _colours(texts: Sequence[Stretches]) -> dict[str, str]:
    """Tag -> CSS class, for the tags around what policy and environment wrote: the most frequent ones."""
    written = ["".join(text for author, text in of_episode if author != "prompt") for of_episode in texts]
    found = Counter(name for text in written for name in {pair[1] for pair in _PAIR.finditer(text)})
    known = [name for name in _SEARCH_R1 if any(f"<{name}>" in text for text in written)]
    others = [name for name, _ in found.most_common() if name not in known][:_OTHER_COLOURS]
    return {name: name for name in known} | {name: f"other{number}" for number, name in enumerate(others)}


def _filled(
    parts: str,
    shown: Sequence[Trajectory],
    counted: str,
    table: Sequence[Sequence[str]],
    title: str,
    colours: Mapping[str, str],
) -> str:
    template = (resources.files("cusearch_async.cli.parts") / "page.html").read_text(encoding="utf-8")
    header, *rows = ("".join(f"<td>{_cell(cell)}</td>" for cell in row) for row in table)
    return Template(template).substitute(
        title=html.escape(title),
        header=header,
        rows="".join(f"<tr>{row}</tr>" for row in rows),
        episodes=parts,
        counted=counted,
        key=" ".join(f'<span class="{kind} inline">{html.escape(name)}</span>' for name, kind in colours.items()),
        depths="".join(f'<option value="{s}">{s}</option>' for s in sorted({t.depth for t in shown})),
    )


def _cell(text: str) -> str:
    """A table cell; an interval is not broken over lines."""
    return html.escape(text).replace(", ", ",&nbsp;")


def _episode(number: int, trajectory: Trajectory, texts: Stretches, colours: Mapping[str, str], note: str = "") -> str:
    """`note` stands at the end of its headline; an episode that was not selected is pale."""
    outcome = "right" if trajectory.em else "wrong"
    parts = "".join(_stretch(author, text, colours) for author, text in texts)
    prediction = "no answer" if trajectory.prediction is None else trajectory.prediction
    gold = html.escape(" | ".join(trajectory.answers))
    summary = (
        f"F1 {trajectory.f1:.2f}, reward {trajectory.reward:.2f}, {trajectory.turns} turns, "
        f"{trajectory.sampled_tokens} tokens sampled, format {'valid' if trajectory.format_valid else 'not valid'}"
    )
    kinds = f"episode {outcome}{' unselected' * (note == UNSELECTED)}"
    return (
        f'<details class="{kinds}" data-outcome="{outcome}" data-depth="{trajectory.depth}">'
        f'<summary><span class="mark">{"✓" if trajectory.em else "✗"}</span>'
        f'<span class="depth" title="depth">{trajectory.depth}</span>'
        f'<span class="question">{html.escape(trajectory.question)}</span>'
        f'<span class="answers">{html.escape(prediction)} <i>gold: {gold}</i></span>'
        f'<span class="advantage">{note}</span></summary>'
        f"<p>{number}: {html.escape(trajectory.question_id)}. {summary}</p>{parts}</details>"
    )


def _stretch(author: str, text: str, colours: Mapping[str, str]) -> str:
    """Blocks are coloured by their tags, whoever wrote them. Other text has the colour of its author."""
    parts = []
    place = 0
    block_of = re.compile(rf"<({'|'.join(map(re.escape, colours))})>.*?(?:</\1>|\Z)", re.DOTALL)
    for block in block_of.finditer(text) if colours and author != "prompt" else ():
        parts.append(html.escape(text[place : block.start()]))
        parts.append(f'<span class="{colours[block[1]]}">{html.escape(block[0])}</span>')
        place = block.end()
    parts.append(html.escape(text[place:]))
    inside = "".join(parts).strip()
    return f'<div class="{author}">{inside}</div>' if inside else ""
