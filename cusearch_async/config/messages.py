"""What is said of a config that cannot be: one line with the key, the value and what would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

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
}
"""What other trainers call a key -> what it is called here."""
_ALIKE = 0.75
"""Share of two names that must agree for one to be a slip of the other."""


def explain(problem: Any) -> str:
    """One line: key, value, what would be right."""
    key = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        section, _, name = key.rpartition(".")
        return _unknown(section, name)
    if problem["type"] == "unknown_method_setting":
        return _unknown(key, problem["ctx"]["key"])
    if problem["type"] == "value_error":
        return f"{key}: {message}" if key else str(message)
    if problem["type"] == "missing":
        return f'{key}: is missing; every config names its run: [run] name = "mine"'
    if problem["type"] == "string_pattern_mismatch":
        return f"{key}: {PATTERNS[problem['ctx']['pattern']]}, got {problem['input']!r}"
    return f"{key}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"


def _unknown(section: str, name: str) -> str:
    key = f"{section}.{name}" if section else name
    return f"{key}: unknown key{_hint(section, name) or '; `cusearch config` lists all'}"


def explain_unknown(arguments: Sequence[str]) -> str:
    """What to say of arguments that are neither a command's own nor overrides."""
    for argument in arguments:
        if re.match(r"\w+\.[\w.]+=", argument):
            return f"{argument!r} is no option; settings are written --section.key value, so --{argument}"
    name = arguments[0].removeprefix("--").partition("=")[0].replace("-", "_")
    return f"{arguments[0]!r} is no option; settings are written --section.key value{_hint('', name, '--')}"


def _hint(section: str, name: str, prefix: str = "") -> str:
    """ "; did you mean …?" for a key that is not in `section`, or nothing where no key is near."""
    known = list(known_keys())
    if name in _OTHER_NAMES:
        return f"; did you mean {prefix}{_OTHER_NAMES[name]}?"
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=_ALIKE)
    elsewhere = [key for key in known if "." in key and key.rpartition(".")[2] == name]
    found = siblings[near[0]] if near else elsewhere[0] if len(elsewhere) == 1 else None
    return f"; did you mean {prefix}{found}?" if found else ""


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every key of the config, dotted."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        yield prefix + name
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from known_keys(kind, f"{prefix}{name}.")
