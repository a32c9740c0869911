"""Error messages for configs: one line with the key, the value and what would be right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from cusearch_async.config.keys import known_keys
from cusearch_async.config.section import PATTERNS, nearest

_OTHER_NAMES = {
    "trainer": "learner",
    "actor": "rollout",
    "learning_rate": "learner.lr",
    "max_grad_norm": "learner.grad_clip",
    "train_batch_size": "pool.questions",
    "num_generations": "pool.rollouts",
    "beta": "loss.kl_coef",
    "max_steps": "run.steps",
    "output_dir": "run.folder",
    "model_name_or_path": "model.path",
    "train_files": "data.source",
}
"""Name of a key in TRL or VERL -> its name here."""
_SIMILARITY = 0.75
"""Similarity from which an unknown key counts as a misspelling of a known one."""


def explain(problem: Any) -> str:
    """One line with key, value and what would be right; for the settings of a method or environment one line each."""
    *parents, last = problem["loc"] or ("",)
    path = [*parents, last] if isinstance(last, str) else parents  # an item of a list is named by its value
    path = [part for part in path if part != "[key]"]
    key, context = ".".join(map(str, path)), problem.get("ctx", {})
    message = problem["msg"].removeprefix("Value error, ")
    given = f", got {problem['input']!r}"
    match problem["type"]:
        case "extra_forbidden":
            return _unknown(*key.rpartition(".")[::2])
        case "unknown_own_setting":
            return _unknown(key, context["key"])
        case "own_settings":
            return "\n".join(explain(own | {"loc": (*problem["loc"], *own["loc"])}) for own in context["problems"])
        case "value_error":
            return f"{key}: {message}" if key else str(message)
        case "missing":
            hint = '; every config names its run: [run] name = "mine"' if key in ("run", "run.name") else ""
            return f"{key}: is missing{hint}"
        case "string_pattern_mismatch":
            rule = PATTERNS.get(context["pattern"], f"must match {context['pattern']}")
        case "tuple_type":
            rule = "must be a list"
        case "too_short":
            rule = f"must have at least {context['min_length']} item"
        case "model_type" | "model_attributes_type" | "dict_type":
            rule = f"must be a section, [{key}] with its settings below"
        case _:
            rule = f"{message[0].lower()}{message[1:]}"
    return f"{key}: {rule}{given}"


def _unknown(section: str, name: str) -> str:
    key = f"{section}.{name}" if section else name
    return f"{key}: unknown key{_hint(section, name) or '; `cusearch config` lists all keys'}"


def explain_unknown_setting(key: str) -> str:
    """The error message for a dotted key that is none of the config."""
    near = nearest(key, known_keys(), _SIMILARITY)
    return f"{key}: unknown key; did you mean {near}?" if near else _unknown(*key.rpartition(".")[::2])


def explain_unknown(arguments: Sequence[str]) -> str:
    """The error message for arguments that are neither options of the command nor overrides."""
    for argument in arguments:
        if re.match(r"\w+\.[\w.-]+=", argument):
            return f"{argument!r} is not an option; write settings as --section.key value, here --{argument}"
    name = arguments[0].removeprefix("--").partition("=")[0].replace("-", "_")
    return f"{arguments[0]!r} is not an option; write settings as --section.key value{_hint('', name, '--')}"


def _hint(section: str, name: str, prefix: str = "") -> str:
    """ "; did you mean …?" for a key that is not in `section`; empty when no known key is similar."""
    if name in _OTHER_NAMES:
        return f"; did you mean {prefix}{_OTHER_NAMES[name]}?"
    label = re.match(r"environment\.([^.]+)", section)
    known = [key.replace("LABEL", label[1]) if label else key for key in known_keys()]
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    near = nearest(name, siblings, _SIMILARITY)
    elsewhere = [key for key in known if "." in key and key.rpartition(".")[2] == name]
    found = siblings[near] if near else elsewhere[0] if len(elsewhere) == 1 else None
    return f"; did you mean {prefix}{found}?" if found else ""
