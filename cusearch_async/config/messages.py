"""Error messages for configs: one line with the key, the value and what would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cusearch_async.config.section import PATTERNS
from cusearch_async.config.whole import Config

_OTHER_NAMES = {
    "trainer": "learner",
    "training": "learner",
    "actor": "rollout",
    "learning_rate": "learner.lr",
    "max_grad_norm": "learner.grad_clip",
    "batch_size": "pool.questions",
    "train_batch_size": "pool.questions",
    "group_size": "pool.rollouts",
    "num_generations": "pool.rollouts",
    "beta": "loss.kl_coef",
    "max_steps": "run.steps",
    "total_steps": "run.steps",
    "epochs": "run.steps",
    "output_dir": "run.folder",
    "model_name_or_path": "model.path",
    "train_files": "data.source",
    "kv_cache_mib": "rollout.vllm.kv_cache_memory_bytes",
}
"""Name of a key in other trainers -> its name here."""
_SIMILARITY = 0.75
"""Similarity from which an unknown key counts as a misspelling of a known one."""


def explain(problem: Any) -> str:
    """One line with key, value and what would be right; for the settings of a method or environment one line each."""
    *parents, last = problem["loc"] or ("",)
    path = [*parents, last] if isinstance(last, str) else parents  # an item of a list is named by its value
    key, context = ".".join(map(str, path)), problem.get("ctx", {})
    message = problem["msg"].removeprefix("Value error, ")
    match problem["type"]:
        case "extra_forbidden":
            section, _, name = key.rpartition(".")
            line = _unknown(section, name)
        case "unknown_own_setting":
            line = _unknown(key, context["key"])
        case "own_settings":
            line = "\n".join(explain(own | {"loc": (*problem["loc"], *own["loc"])}) for own in context["problems"])
        case "value_error":
            line = f"{key}: {message}" if key else str(message)
        case "missing":
            hint = '; every config names its run: [run] name = "mine"' if key in ("run", "run.name") else ""
            line = f"{key}: is missing{hint}"
        case "string_pattern_mismatch":
            rule = PATTERNS.get(context["pattern"], f"must match {context['pattern']}")
            line = f"{key}: {rule}, got {problem['input']!r}"
        case "tuple_type":
            line = f"{key}: must be a list, got {problem['input']!r}"
        case "too_short":
            line = f"{key}: must have at least {context['min_length']} item, got {problem['input']!r}"
        case "model_type" | "model_attributes_type" | "dict_type":
            line = f"{key}: must be a section, [{key}] with its settings below, got {problem['input']!r}"
        case _:
            line = f"{key}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"
    return line


def _unknown(section: str, name: str) -> str:
    key = f"{section}.{name}" if section else name
    return f"{key}: unknown key{_hint(section, name) or '; `cusearch config` lists all keys'}"


def explain_unknown_setting(key: str) -> str:
    """The error message for a dotted key that is none of the config."""
    near = difflib.get_close_matches(key, known_keys(), n=1, cutoff=_SIMILARITY)
    return f"{key}: unknown key; did you mean {near[0]}?" if near else _unknown(*key.rpartition(".")[::2])


def explain_unknown(arguments: Sequence[str]) -> str:
    """The error message for arguments that are neither options of the command nor overrides."""
    for argument in arguments:
        if re.match(r"\w+\.[\w.-]+=", argument):
            return f"{argument!r} is not an option; write settings as --section.key value, here --{argument}"
    name = arguments[0].removeprefix("--").partition("=")[0].replace("-", "_")
    return f"{arguments[0]!r} is not an option; write settings as --section.key value{_hint('', name, '--')}"


def _hint(section: str, name: str, prefix: str = "") -> str:
    """ "; did you mean …?" for a key that is not in `section`; empty when no known key is similar."""
    label = re.match(r"environment\.([^.]+)", section)
    known = [key.replace("LABEL", label[1]) if label else key for key in known_keys()]
    if name in _OTHER_NAMES:
        return f"; did you mean {prefix}{_OTHER_NAMES[name]}?"
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=_SIMILARITY)
    elsewhere = [key for key in known if "." in key and key.rpartition(".")[2] == name]
    found = siblings[near[0]] if near else elsewhere[0] if len(elsewhere) == 1 else None
    return f"; did you mean {prefix}{found}?" if found else ""


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every key of the config, dotted; LABEL stands for a label that the user chooses."""
    for name, field in model.model_fields.items():
        yield prefix + name
        inner, label = section_of(field)
        if inner is not None:
            yield from known_keys(inner, f"{prefix}{name}.{label}")


def section_of(field: FieldInfo) -> tuple[type[BaseModel] | None, str]:
    """(the section class of a key, None for a plain setting; "LABEL." for a table of labelled sections, else "")."""
    kind, label = field.annotation, ""
    if get_origin(kind) is dict:
        kind, label = get_args(kind)[1], "LABEL."
    return (kind, label) if isinstance(kind, type) and issubclass(kind, BaseModel) else (None, "")
