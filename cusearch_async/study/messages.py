"""Error messages for study files, in the words of the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from cusearch_async.config.messages import explain
from cusearch_async.config.section import nearest

_HINTS = {
    "study": '; the file of a study begins with [study], name = "mine" and configs = ["atlas"]',
    "study.baseline": '; it says what the other runs are compared with, like { "method.name" = "grpo_full" }',
    "study.configs": '; it names the config files of all runs, like ["atlas"]',
    "part": "; a study has one or more [[part]], each with name, seeds and [part.grid]",
    "part.seeds": "; it is the number of runs of each combination, like seeds = 3",
}
"""Key of a study file -> what belongs there."""


def explain_study(error: ValidationError, file: Mapping[str, Any], sections: Mapping[str, type[BaseModel]]) -> str:
    """One line per mistake. `sections` are the models by the name of their section, "" for that of the `file`."""
    problems = error.errors()
    unknown = [problem["loc"] for problem in problems if problem["type"] == "extra_forbidden"]
    lines = []
    for problem in problems:
        kind, loc = problem["type"], problem["loc"]
        # pydantic counts only items without a mistake, and a misspelled key is there, with another name
        is_too_short = kind == "too_short" and any(o["loc"][: len(loc)] == loc != o["loc"] for o in problems)
        is_misspelled = kind == "missing" and any(nearest(str(name), [str(loc[-1])]) for *_, name in unknown)
        if not is_too_short and not is_misspelled:
            lines.append(_explain(problem, file, sections))
    return "\n".join(lines)


def _explain(problem: Any, file: Mapping[str, Any], sections: Mapping[str, type[BaseModel]]) -> str:
    *outer, key = problem["loc"]
    if isinstance(key, int) and outer[1:]:  # an item of a list is named by its value
        *outer, key = outer
    parents = [part for part in outer if isinstance(part, str)]
    place = _place(outer, file)
    if problem["type"] == "extra_forbidden":
        known = list(sections[parents[-1] if parents else ""].model_fields)
        near = nearest(str(key), known)
        meant = f"[[{near}]]" if near in ("part", "claim") else near
        return f"{place}{key}: unknown key; " + (f"did you mean {meant}?" if near else f"there are {', '.join(known)}")
    dotted = ".".join([*parents, str(key)])
    if problem["type"] == "missing":
        return f"{place}{key}: is missing{_HINTS.get(dotted, '')}"
    if problem["type"] == "tuple_type" and dotted in ("part", "claim"):
        return f"{key}: there can be several, so write [[{key}]], not [{key}]"
    if problem["type"] == "tuple_type":
        return f'{place}{key}: must be a list, like ["a", "b"], got {problem["input"]!r}'
    if problem["type"] == "dict_type":
        return f'{place}{key}: must be settings, like {{ "method.name" = "grpo_full" }}, got {problem["input"]!r}'
    return place + explain(problem | {"loc": (str(key),)})


def _place(outer: list[Any], file: Mapping[str, Any]) -> str:
    """Where a key stands: `part 'methods': `, `study: `, or nothing for a key outside of all sections."""
    found: Any = file
    words: list[str] = []
    for part in outer:
        inner = found.get(part) if isinstance(found, dict) else found[part] if isinstance(found, list) else None
        found = {} if inner is None else inner
        if isinstance(part, int):
            name = found.get("name", found.get("text")) if isinstance(found, dict) else None
            words[-1] += f" {name!r}" if name else f" number {part + 1}"
        else:
            words.append(part)
    return "".join(f"{word}: " for word in words)
