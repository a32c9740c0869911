"""Episodes as JSON for the page: what the policy wrote and what it was shown, turn by turn, each kind in a colour."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cusearch_async.replay.selection import RecordedStep
from cusearch_async.training.recorder import read_record, recorded
from cusearch_async.types import Trajectory

Json = dict[str, Any]
Stretches = list[tuple[str, str]]
MOST = 200
"""Most episodes of an evaluation on a page."""
MOST_EARLIER = 5
"""Steps in which a question is shown again."""
_PAIR = re.compile(r"<([A-Za-z][\w.-]{0,30})>.*?</\1>", re.DOTALL)
_SEARCH_R1 = ("think", "search", "information", "answer")
"""Tags with colours that do not depend on what else is on the page."""
_OTHER_COLOURS = 6
"""Colours for the tags of other environments."""


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


def coloured(trajectory: Trajectory, tokenizer: Any) -> list[tuple[str, list[tuple[str, str]]]]:
    """The same, each stretch as (class, text)."""
    texts = stretches(trajectory, tokenizer)
    colours = _colours([texts])
    return [(author, _pieces(author, text, colours)) for author, text in texts]


def groups_of(step: RecordedStep) -> Json:
    """Its groups. Raises: ConfigError when the tokenizer of its model is not there."""
    from cusearch_async.models import load_tokenizer  # noqa: PLC0415  (transformers takes seconds to import)

    advantages = dict(zip(step.record.selected, step.record.advantages, strict=True))
    return {"step": step.record.step} | groups(
        step.pool.trajectories, advantages, load_tokenizer(step.config.model.location)
    )


def earlier(run_folder: Path, question_id: str, before: int) -> list[Json]:
    """The groups of a question in steps that were recorded earlier than `before`: the newest steps first, at most
    MOST_EARLIER. Raises: ConfigError."""
    found: list[Json] = []
    for number in sorted(recorded(run_folder), reverse=True):
        if number < before and _may_have(run_folder, number, question_id):
            step = groups_of(RecordedStep.read(run_folder, number))
            found += [group | {"step": number} for group in step["groups"] if group["id"] == question_id]
            if len({group["step"] for group in found}) == MOST_EARLIER:
                break
    return found


def _may_have(run_folder: Path, step: int, question_id: str) -> bool:
    """Whether the id stands in a payload of the step; payloads are not decoded for it."""
    return any(question_id.encode() in payload for payload in read_record(run_folder, step).pool)


def groups(trajectories: Sequence[Trajectory], advantages: Mapping[int, float], tokenizer: Any) -> Json:
    """First those that taught most: by the sum of |advantage|. `advantages` are those of the selected trajectories, by
    their places in the pool."""
    shown, colours = _shown(trajectories, advantages, tokenizer)
    found = []
    for ticket, members in itertools.groupby(range(len(trajectories)), key=lambda place: trajectories[place].ticket):
        places = list(members)
        taught = sum(abs(advantages.get(place, 0.0)) for place in places)
        found.append(_group(trajectories[places[0]], f"{ticket}", taught, [shown[place] for place in places]))
    return {"colours": colours, "groups": sorted(found, key=lambda group: -group["taught"])}


def episodes_of(episodes: Sequence[Trajectory], tokenizer: Any) -> Json:
    """Those of an evaluation, each alone. At most MOST: the wrong ones, then right ones, each evenly spaced."""
    numbers = _spread(episodes)
    some = [episodes[number] for number in numbers]
    shown, colours = _shown(some, {}, tokenizer)
    found = [_group(one, f"{number}", 0.0, [of_one]) for number, one, of_one in zip(numbers, some, shown, strict=True)]
    counted = f"all {len(episodes)} episodes"
    if len(some) < len(episodes):
        wrong, of_wrong = (sum(not t.em for t in which) for which in (some, episodes))
        counted = f"{len(some)} of {len(episodes)} episodes, with {wrong} of the {of_wrong} wrong ones"
    return {"counted": counted, "colours": colours, "groups": found}


def _group(first: Trajectory, number: str, taught: float, episodes: list[Json]) -> Json:
    about = {"id": first.question_id, "number": number, "question": first.question, "gold": " | ".join(first.answers)}
    return about | {"taught": taught, "episodes": episodes}


def _shown(
    trajectories: Sequence[Trajectory], advantages: Mapping[int, float], tokenizer: Any
) -> tuple[list[Json], dict[str, str]]:
    """Each as JSON, and the colours of their tags. An `advantage` of null: not selected."""
    texts = [stretches(trajectory, tokenizer) for trajectory in trajectories]
    colours = _colours(texts)
    shown = [
        {
            "right": bool(trajectory.em),
            "depth": trajectory.depth,
            "prediction": trajectory.prediction,
            "advantage": advantages.get(place),
            "summary": _summary(trajectory),
            "parts": [[author, _pieces(author, text, colours)] for author, text in texts[place]],
        }
        for place, trajectory in enumerate(trajectories)
    ]
    return shown, colours


def _summary(trajectory: Trajectory) -> str:
    return (
        f"{trajectory.question_id}. F1 {trajectory.f1:.2f}, reward {trajectory.reward:.2f}, {trajectory.turns} turns, "
        f"{trajectory.sampled_tokens} tokens sampled, format {'valid' if trajectory.format_valid else 'not valid'}"
    )


def _spread(episodes: Sequence[Trajectory]) -> list[int]:
    """Numbers of the episodes to show, ascending."""
    chosen: list[int] = []
    for is_right in (False, True):
        numbers = [number for number, t in enumerate(episodes) if bool(t.em) is is_right]
        step = -(-len(numbers) // max(1, MOST - len(chosen)))
        chosen += numbers[:: max(1, step)] if len(chosen) < MOST else []
    return sorted(chosen)


def _colours(texts: Sequence[Stretches]) -> dict[str, str]:
    """Tag -> CSS class, for the tags around what policy and environment wrote: the most frequent ones."""
    written = ["".join(text for author, text in of_episode if author != "prompt") for of_episode in texts]
    found = Counter(name for text in written for name in {pair[1] for pair in _PAIR.finditer(text)})
    known = [name for name in _SEARCH_R1 if any(f"<{name}>" in text for text in written)]
    others = [name for name, _ in found.most_common() if name not in known][:_OTHER_COLOURS]
    return {name: name for name in known} | {name: f"other{number}" for number, name in enumerate(others)}


def _pieces(author: str, text: str, colours: Mapping[str, str]) -> list[tuple[str, str]]:
    """(class, text) in order. Blocks have the class of their tags, whoever wrote them; other text has none."""
    found, place = [], 0
    block_of = re.compile(rf"<({'|'.join(map(re.escape, colours))})>.*?(?:</\1>|\Z)", re.DOTALL)
    for block in block_of.finditer(text) if colours and author != "prompt" else ():
        found += [("", text[place : block.start()]), (colours[block[1]], block[0])]
        place = block.end()
    return [(kind, piece) for kind, piece in (*found, ("", text[place:])) if piece]
