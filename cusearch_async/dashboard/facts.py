"""What the page shows of a run, as JSON: made of the run's folder alone."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cusearch_async.alarms.firing import Alarm, alarms_of, look_closer
from cusearch_async.alarms.rules import RULES, Rule
from cusearch_async.config import flat
from cusearch_async.dashboard.healthy import healthy
from cusearch_async.dashboard.kept import KeptRun
from cusearch_async.metrics.files import seconds_per_step, steps_done
from cusearch_async.metrics.table import PLACE
from cusearch_async.run.identity import HOOKS
from cusearch_async.training.checkpoint import NAME as CHECKPOINT
from cusearch_async.training.recorder import recorded

Json = dict[str, Any]
MOST_POINTS = 1000
"""Steps of a curve; of more, evenly spaced ones are kept, and the last."""
SHORT = ("reward/em", "reward/all", "depth/mean", "groups/mixed_share", "staleness/mean", "train/entropy")
SHORT_POINTS = 300
"""Curves and points in the list of runs."""
MOST_OVER = 3
"""Alarms on the page that fire no more."""
MOST_SCORED = 100
"""Scored versions, each with all its questions: evenly spaced ones, too."""
MOST_DEPTHS = 1000
"""Searches of an episode; a question with more is damaged."""
SIDES = {"before": "the start", "after": "the end", "baseline": "the baseline"}
"""The scorings of a demo."""


def facts(run: KeptRun) -> Json:
    """All but what Redis and the step records hold."""
    return news(run) | {"rows": columns(run.rows), "last": last_of(run.rows), "count": len(run.rows)}


def last_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """`EPOCH.STEP` of the last one; empty without one."""
    return f"{rows[-1]['epoch']}.{rows[-1]['step']}" if rows else ""


def news(run: KeptRun) -> Json:
    """All but the curves."""
    questions, scored = shared_ids(scores(run))
    return {
        "name": run.folder.resolve().name,
        "about": about(run),
        "bounds": bounds(run),
        "progress": progress(run),
        "questions": questions,
        "scores": scored,
        "lag": lag(run),
        **shown_alarms(run),
        "rules": [rule_shown(rule) for rule in RULES],
        "healthy": healthy(run.settings),
        "settings": [[key, json.dumps(value)] for key, value in flat(run.settings) if key not in HOOKS],
        "starts": [start_shown(run, number) for number in range(len(run.starts))],
        "recorded": list(recorded(run.folder)),
        "commands": commands(run.folder),
    }


def in_short(run: KeptRun) -> Json:
    """A row in the list of runs, with curves to lay over those of others."""
    kept = thinned(run.rows, SHORT_POINTS)
    curves = {name: [rounded(row.get(name)) for row in kept] for name in SHORT}
    return {
        "name": run.folder.resolve().name,
        "about": about(run),
        "progress": progress(run),
        "last_em": run.last_em,
        "firing": None if run.history is None else len(firing(run)),
        "step": [row["step"] for row in kept],
        "values": curves,
    }


def about(run: KeptRun) -> Json:
    note, tags = run.setting("run", "note"), run.setting("run", "tags")  # of another version: none
    return {
        "method": run.setting("method", "name"),
        "model": run.setting("model", "path"),
        "seed": run.setting("run", "seed"),
        "said": [*tags, note] if isinstance(tags, list) else [],
    }


def bounds(run: KeptRun) -> Json:
    """Settings that charts draw as lines, or need as sizes; null in a folder without a config."""
    sought = {
        "staleness": ("pool", "max_staleness"),
        "s_max": ("episode", "s_max"),
        "grad_clip": ("learner", "grad_clip"),
    }
    found = {name: run.setting(*place) for name, place in sought.items()}
    deferral = run.setting("pool", "defer") if run.setting("pool", "order") == "deferred" else 0
    if isinstance(found["staleness"], int) and isinstance(deferral, int):
        found["staleness"] += deferral
    if run.setting("pool", "order") == "oldest_complete":  # which has none
        found["staleness"] = None
    return {name: rounded(value) for name, value in found.items()}


def progress(run: KeptRun) -> Json:
    """Steps done and planned, the seconds of a step, and how the run has ended."""
    return {
        "done": steps_done(run.rows),
        "steps": run.setting("run", "steps"),
        "step_s": rounded(seconds_per_step(run.rows)),
        "outcome": run.outcome,
        "error": run.error,
    }


def columns(rows: Sequence[Mapping[str, Any]]) -> Json:
    """`step` [n]; `values`: name -> [n], and name -> [n][S+1] for metrics by depth; null where a step has none."""
    kept = thinned(rows, MOST_POINTS)
    names = sorted({name for row in kept for name in row} - set(PLACE))
    return {
        "step": [row["step"] for row in kept],
        "values": {name: [rounded(row.get(name)) for row in kept] for name in names},
    }


def thinned(rows: Sequence[Mapping[str, Any]], most: int) -> Sequence[Mapping[str, Any]]:
    """At most so many, evenly spaced, with the first and the last."""
    if len(rows) <= most:
        return rows
    return [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]


def rounded(value: Any) -> Any:
    """To six digits; what is no finite number is null."""
    if isinstance(value, list):
        return [rounded(one) for one in value]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def scores(run: KeptRun) -> list[Json]:
    """Of each scored version, by category, and every question: those of the evaluator, else those of a demo."""
    found = [
        {
            "step": row["step"],
            "what": f"version {row['step']}",
            "categories": by_category(row),
            "each": each_question(row.get("each")),
        }
        for row in thinned(run.scores, MOST_SCORED)
    ]
    return found or [score for side in SIDES if (score := demo_score(run, side)) is not None]


def by_category(row: Mapping[str, Any]) -> Json:
    return {
        name: {key: rounded(value) for key, value in of.items()}
        for name, of in row.items()
        if isinstance(of, dict) and "count" in of
    }


def each_question(each: Any) -> Json:
    """Of every question [n] its id, whether its answer is right, and its searches; lists without any where `each`, of a
    row of eval.jsonl, does not have them."""
    nothing: Json = {"ids": [], "right": [], "depth": []}
    match each:
        case {"question_id": list(ids), "em": list(em), "depth": list(depth)}:
            rows = [row for row in zip(ids, em, depth, strict=False) if _is_whole(*row)]
            return {name: [row[place] for row in rows] for place, name in enumerate(nothing)}
    return nothing


def _is_whole(question_id: Any, right: Any, depth: Any) -> bool:
    return isinstance(question_id, str) and right in (0, 1) and isinstance(depth, int) and 0 <= depth < MOST_DEPTHS


def shared_ids(scores: Sequence[Json]) -> tuple[list[list[str]], list[Json]]:
    """The distinct lists of ids, and `scores` with the place of theirs instead: most versions have the same one."""
    lists: dict[tuple[str, ...], int] = {}
    found = []
    for score in scores:
        place = lists.setdefault(tuple(score["each"]["ids"]), len(lists))
        found.append(score | {"each": score["each"] | {"ids": place}})
    return [list(ids) for ids in lists], found


def demo_score(run: KeptRun, side: str) -> Json | None:
    """What `cusearch demo` has scored at one side of its run; None without it."""
    try:
        found = json.loads((run.folder / f"eval_{side}.json").read_bytes())
        each = {name: [one[name] for one in found["questions"]] for name in ("question_id", "em", "depth")}
        return {
            "step": int(CHECKPOINT.findall(found["conditions"]["model"])[-1][0]) if side == "after" else 0,
            "what": SIDES[side],
            "categories": by_category(found["scores"]),
            "each": each_question(each),
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def alarms(run: KeptRun) -> list[Alarm] | None:
    """Newest first; None where the settings that rules need are not known."""
    history = run.history
    if history is None:
        return None
    return sorted(alarms_of(run.rows, history), key=lambda alarm: alarm.last, reverse=True)


def firing(run: KeptRun) -> list[str]:
    """Names of the alarms that fire now."""
    return [alarm.rule.name for alarm in alarms(run) or () if alarm.is_firing]


def shown_alarms(run: KeptRun) -> Json:
    """Those that fire, and the newest of the others, which are counted; None where they are not known."""
    found = alarms(run)
    if found is None:
        return {"alarms": None, "alarms_over": None}
    now, over = ([alarm for alarm in found if alarm.is_firing is fires] for fires in (True, False))
    return {"alarms": [alarm_shown(alarm, run.folder) for alarm in [*now, *over[:MOST_OVER]]], "alarms_over": len(over)}


def lag(run: KeptRun) -> Json | None:
    """Steps between the newest version and the newest one that was scored, where that is more than it should be."""
    every = run.setting("eval", "every")
    if not isinstance(every, int) or not every or not run.rows:
        return None
    scored = run.scores[-1]["step"] if run.scores else run.rows[0]["step"]
    behind = steps_done(run.rows) - scored
    if behind <= 2 * every:
        return None
    newest = f"the newest scored version is {scored}, {behind} steps ago"
    text = f"{newest if run.scores else 'no version is scored in this folder'}, with eval.every = {every}"
    return {"name": "evaluator_lags", "text": text}


def rule_shown(rule: Rule) -> Json:
    return {key: value for key, value in asdict(rule).items() if key != "find"}


def alarm_shown(alarm: Alarm, folder: Path) -> Json:
    look = look_closer(alarm, folder)
    shown = {"first": alarm.first, "last": alarm.last, "evidence": alarm.evidence, "firing": alarm.is_firing}
    return rule_shown(alarm.rule) | shown | {"look": look}


def start_shown(run: KeptRun, number: int) -> Json:
    start, stop = run.starts[number], run.stop(number)
    return {
        "epoch": start.epoch,
        "step": start.step,
        "time": start.time,
        "host": start.host,
        "commit": start.commit,
        "versions": start.versions,
        "machine": start.machine,
        "command": " ".join(without_hooks(start.launched or start.argv)),
        "ended": None if stop is None else f"{stop.time}: {stop.outcome}",
    }


def without_hooks(words: Sequence[str]) -> Iterator[str]:
    """The words of a command, with … for the value of each of HOOKS."""
    names = tuple(f"--{key}" for key in HOOKS)
    for before, word in zip(("", *words), words, strict=False):
        name, equals, _ = word.partition("=")
        yield "…" if before in names else f"{name}=…" if equals and name in names else word


def commands(folder: Path) -> Iterable[str]:
    """To look closer, with the run's folder."""
    run, settings, launch = (shlex.quote(str(folder / name)) for name in ("", "config.toml", "launch.toml"))
    return (
        f"cusearch buckets {settings}",
        f"cusearch trace {run} --step N",
        f"cusearch replay {run} --step N --method grpo_full",
        f"cusearch launch {launch}",
    )
