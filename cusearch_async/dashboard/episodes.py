"""Episodes as JSON for the page: what the policy wrote and what it was shown, turn by turn, each kind in a colour."""

from __future__ import annotations

import itertools
import logging
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cusearch_async.errors import ConfigError, first_line
from cusearch_async.replay.selection import RecordedStep
from cusearch_async.training.recorder import recorded, unpacked
from cusearch_async.types import Trajectory

log = logging.getLogger(__name__)

Json = dict[str, Any]
Stretches = list[tuple[str, str]]
MOST = 200
"""Most episodes of an evaluation on a page."""
MOST_EARLIER = 5
"""Steps in which a question is shown again."""
_OF_EPISODE = ("model", "environment")
_OPEN = re.compile(r"<([A-Za-z][\w.-]{0,30})>")
_SEARCH_R1 = ("think", "search", "information", "answer")
"""Tags with colours that do not depend on what else is on the page."""
_OTHER_COLOURS = 6
"""Colours for the tags of other environments."""


def spans(trajectory: Trajectory) -> Iterator[tuple[str, list[int]]]:
    """(author, token ids) in order, of each row: `prompt`, then alternately `model` and `environment`."""
    for row in trajectory.rows:
        authors = itertools.chain(["prompt"], itertools.cycle(["model", "environment"]))
        for author, tokens in zip(authors, row.parts, strict=False):
            yield author, tokens.tolist()


def stretches(trajectory: Trajectory, tokenizer: Any) -> Stretches:
    """The same as text, and what an agent's program wrote to `stderr`."""
    texts = [(author, tokenizer.decode(ids, skip_special_tokens=False)) for author, ids in spans(trajectory)]
    return texts + ([("stderr", trajectory.stderr)] if trajectory.stderr else [])


def coloured(trajectory: Trajectory, tokenizer: Any) -> list[tuple[str, list[tuple[str, str]]]]:
    """The same, each stretch as (class, text)."""
    texts = stretches(trajectory, tokenizer)
    colours = _colours([texts])
    return [(author, _pieces(author, text, colours)) for author, text in texts]


def groups_of(step: RecordedStep, question_id: str | None = None) -> Json:
    """Its groups, or those of one question. Raises: ConfigError when the tokenizer of its model is not there."""
    from cusearch_async.models import load_tokenizer  # noqa: PLC0415  (transformers takes seconds to import)

    advantages = dict(zip(step.record.selected, step.record.advantages, strict=True))
    whole = list(enumerate(step.pool.trajectories))
    chosen = [(place, one) for place, one in whole if question_id in (None, one.question_id)]
    of_chosen = {number: advantages[place] for number, (place, _) in enumerate(chosen) if place in advantages}
    tokenizer = load_tokenizer(step.config.model.location)
    return {"step": step.record.step} | groups([one for _, one in chosen], of_chosen, tokenizer)


def earlier(run_folder: Path, question_id: str, before: int) -> list[Json]:
    """The groups of a question in steps that were recorded earlier than `before`, with their step and colours: the
    newest steps first, at most MOST_EARLIER. A record that cannot be read is left out. Raises: ConfigError when the
    tokenizer is not there."""
    found: list[Json] = []
    written = msgspec.msgpack.encode(question_id)  # as it stands in a payload, which is not decoded for it
    for number, path in sorted(recorded(run_folder).items(), reverse=True):
        if number >= before or not _holds(path, written):
            continue
        try:
            step = RecordedStep.read(run_folder, number)
        except ConfigError as error:
            log.warning("step %d is not shown: %s", number, first_line(error))
            continue
        of_question = groups_of(step, question_id)
        found += [group | {key: of_question[key] for key in ("step", "colours")} for group in of_question["groups"]]
        if len({group["step"] for group in found}) == MOST_EARLIER:
            break
    return found


def _holds(record: Path, written: bytes) -> bool:
    """Whether it holds these bytes; False for one that is gone, or damaged."""
    try:
        return written in unpacked(record)
    except (OSError, ValueError, zlib.error):
        return False


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
    written = ["".join(text for author, text in of_episode if author in _OF_EPISODE) for of_episode in texts]
    found = Counter(name for text in written for name in _closed(text))
    known = [name for name in _SEARCH_R1 if any(f"<{name}>" in text for text in written)]
    others = [name for name, _ in found.most_common() if name not in known][:_OTHER_COLOURS]
    return {name: name for name in known} | {name: f"other{number}" for number, name in enumerate(others)}


def _closed(text: str) -> set[str]:
    """Names of the outermost tags that are closed. One that never is, is looked for once: a text of thousands of them
    takes no longer."""
    found, never, place = set[str](), set[str](), 0
    while (tag := _OPEN.search(text, place)) is not None:
        place, end = tag.end(), -1 if tag[1] in never else text.find(f"</{tag[1]}>", tag.end())
        if end < 0:
            never.add(tag[1])
        else:
            found.add(tag[1])
            place = end
    return found


def _pieces(author: str, text: str, colours: Mapping[str, str]) -> list[tuple[str, str]]:
    """(class, text) in order. Blocks have the class of their tags, whoever wrote them; other text has none."""
    found, place = [], 0
    block_of = re.compile(rf"<({'|'.join(map(re.escape, colours))})>.*?(?:</\1>|\Z)", re.DOTALL)
    for block in block_of.finditer(text) if colours and author in _OF_EPISODE else ():
        found += [("", text[place : block.start()]), (colours[block[1]], block[0])]
        place = block.end()
    return [(kind, piece) for kind, piece in (*found, ("", text[place:])) if piece]
