"""The answer to "is this the same run?".

Before it loads anything large, a process is compared with every record of the run:

| record | holds | is compared with |
|---|---|---|
| Redis | the run contract: settings and data that all processes share | every process, again at each of its calls |
| Redis | the run's folder, by the id in its marker | the learner; `launch`, `reset` |
| the last start in the folder (`run.history`) | all settings, data, the address of Redis | the learner; `launch` |
| the checkpoint | the settings that it depends on | the learner |

When a learner takes the run over, Redis compares again, in the same atomic step that writes the learner's own identity.
A refusal names each key and both values (`not_this_run`).
"""

from __future__ import annotations

import dataclasses
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from cusearch_async.config import Config, Scope, flat, scope_of
from cusearch_async.errors import ContractMismatch
from cusearch_async.run.folder import read_marker
from cusearch_async.types import PAYLOAD_SCHEMA, Question

DATA, MODEL = "content of data.source", "content of model.path"
"""Fingerprints of the files that these settings name; the paths may differ between machines."""
SERVED = "retriever serves"
"""The retriever's own description of what it serves. No setting: the retriever has its own config."""
GROUPS = "groups per step (pool.questions, or K / G for grpo_half)"
_OF_A_TICKET = {"questions": GROUPS, "rollouts": "pool.rollouts", "order": "pool.order", "defer": "pool.defer"}
"""Run limits that stay as they are while tickets are granted -> the user's name of each."""
ACCEPT_CHANGES = "--accept-changes"
"""The learner's option to continue with settings that change what the run means."""
_LASTING = ("model.dtype", "learner.trained_layers", "learner.lora.", *_OF_A_TICKET.values(), "pool.questions")
"""Beginnings of the keys that a checkpoint, or the granted tickets, depend on."""
NOT_SET = "not set"

HOOKS = ("alarms.command", "alarms.url")
"""Settings that may hold keys: their values are in no log and on no page."""

_OF_A_COPY = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
"""Keys of config.json that may differ between two copies of one model. The run's dtype is model.dtype."""


class Difference(NamedTuple):
    """One key that two sides do not agree on; the values as text."""

    key: str
    own: str
    other: str

    def __str__(self) -> str:
        """As a change of `other`."""
        if self.key in HOOKS:
            return f"{self.key} is another"
        return f"{self.key}: {self.other} -> {self.own}"


def differences(own: Mapping[str, str], other: Mapping[str, str]) -> list[Difference]:
    """In the order of `own`, then the keys that only `other` has."""
    keys = [*own, *(key for key in other if key not in own)]
    pairs = (Difference(key, own.get(key, NOT_SET), other.get(key, NOT_SET)) for key in keys)
    return [pair for pair in pairs if pair.own != pair.other]


def texts_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> text, of settings as TOML has them."""
    return {key: repr(value) for key, value in flat(settings)}


def not_this_run(name: str, found: Sequence[Difference], remedy: str = "") -> ContractMismatch:
    """The error for a process that would join or continue run `name`, and differs from it; the usual `remedy` is that
    of the keys."""
    if lasting := [key for key, *_ in found if key.startswith(_LASTING)]:
        remedy = remedy or f"in a run that has begun {', '.join(lasting)} cannot change: `cusearch reset` deletes it"
    remedy = remedy or f"only its learner can change them, with {ACCEPT_CHANGES}"
    listed = ", ".join(f"{key} is {own} here and {other} in the run" for key, own, other in found)
    return ContractMismatch(
        f"this process does not match run {name!r}: {listed}; use the settings, data and version of the run "
        f"(config.toml in its folder), or another run.name and run.folder; {remedy}"
    )


@dataclass(frozen=True)
class Identity:
    """Which run a process means, or which run Redis holds."""

    terms: Mapping[str, str] = field(default_factory=dict)
    """The run contract: every setting of scope SHARED, and fingerprints of the data. Key -> text."""
    run_id: str = ""
    """From the marker in the run's folder, so it stays the same when the folder is moved; empty without a marker. Other
    processes learn it when they join."""
    host: str = ""
    folder: str = ""
    """Where a learner last started in it. Empty for other processes: they need no folder of the run."""

    @cached_property
    def digest(self) -> str:
        """Checksum of all terms; empty without terms."""
        return checksum(dict(self.terms)) if self.terms else ""

    @property
    def joined(self) -> str:
        """For the scripts: the digest, and the id of the run that this process means or has joined."""
        return f"{self.digest} {self.run_id}".rstrip()

    def after_joining(self, run: Identity) -> Identity:
        """Of a process that needs no folder: from now on it means this `run`, and no later one of the same name."""
        return self if self.folder else replace(self, run_id=run.run_id)

    def with_retriever(self, serves: str | None) -> Identity:
        """Of a process whose retriever has reported what it serves; None when it reports nothing."""
        return replace(self, terms={**self.terms, SERVED: serves or "not reported"})

    def in_folder(self, folder: Path) -> Identity:
        """Of a process that works in the run's folder. Raises: ConfigError for a marker that cannot be read."""
        marker = read_marker(folder)
        run_id = marker.id if marker else ""
        return replace(self, run_id=run_id, host=socket.gethostname(), folder=str(folder.resolve()))

    def may_delete(self, run: Identity) -> bool:
        """Whether a command in this folder may delete `run` from Redis: it is this folder's, or its folder was deleted.

        If there is no folder at all, the host is not compared, because some hosts get a new name at each start."""
        was_here = self.folder == run.folder and (not self.run_id or self.host == run.host)
        return (run.run_id in ("", self.run_id) or was_here) and not self.is_copy_of(run)

    def is_copy_of(self, run: Identity) -> bool:
        """Whether the folder of `run` is beside this one: that of a folder that was moved is gone. Raises: ConfigError
        for a marker that cannot be read."""
        if not self.run_id or self.run_id != run.run_id or not (self.folder and run.folder):
            return False
        try:
            if Path(run.folder).samefile(self.folder):
                return False
            markers = [read_marker(Path(folder)) for folder in (self.folder, run.folder)]
        except OSError:  # it is not there, or not this user's any more
            return False
        return all(marker and marker.id == self.run_id and not marker.is_adopted for marker in markers)


NOBODY = Identity()
"""The identity of operator commands, which do not join the run."""


def identity_of(config: Config, questions: Sequence[Question], tokenizer: Any) -> Identity:
    """Of a process with this config, these questions and this tokenizer.

    Raises: ConfigError when the model's config.json cannot be read."""
    settings = texts_of(config.model_dump(mode="json"))
    terms = {key: text for key, text in settings.items() if scope_of(key) is Scope.SHARED}
    for label, environment in config.environment.items():
        terms[f"environment.{label}.template"] = checksum(dataclasses.astuple(environment.prompt))
    terms |= {
        DATA: fingerprint_of_questions(questions),
        MODEL: _fingerprint_of_model(config.model.location, tokenizer),
        "payload_schema": str(PAYLOAD_SCHEMA),
    }
    return Identity(terms)


def loaded_terms(config: Config) -> dict[str, str]:
    """Settings without which a checkpoint cannot be loaded."""
    lora = config.learner.lora
    return {
        "model.dtype": config.model.dtype,
        "learner.trained_layers": str(config.learner.trained_layers),
        **texts_of({"learner": {"lora": lora.model_dump(mode="json") if lora.rank else {"rank": 0}}}),
    }


def fixed_terms(config: Config) -> dict[str, str]:
    """Those, and the settings without which a checkpoint's tickets make other pools."""
    tickets = {"pool.rollouts": str(config.pool.rollouts), GROUPS: str(config.questions_per_step)}
    return loaded_terms(config) | tickets


def refusal(name: str, own: Identity, run: Identity, accepts_changes: bool = False) -> ContractMismatch | None:
    """Why a process must not take part in run `name` of Redis, whose identity is `run`; None when it may."""
    if not own.folder and own.run_id and run.run_id not in ("", own.run_id):
        return ContractMismatch(
            f"the run {name!r} that this process joined is gone, and Redis holds a later one of this name; start this "
            "process again"
        )
    if own.folder and run.run_id and own.run_id != run.run_id:
        places = Difference("run.folder", f"{own.folder} on {own.host}", f"{run.folder} on {run.host}")
        command = shlex.join(["cusearch", "reset", "CONFIG", "--run.folder", run.folder])
        return not_this_run(name, [places], f"`{command}` deletes that run")
    if own.is_copy_of(run):
        return ContractMismatch(
            f"{own.folder} is a copy of {run.folder}, the folder of run {name!r}; `cusearch runs fork` makes another "
            "run of a checkpoint"
        )
    if accepts_changes or own.terms == run.terms:
        return None
    if not run.terms:
        return ContractMismatch(f"Redis has lost the contract of run {name!r}; start the learner again, it writes it")
    return not_this_run(name, differences(own.terms, run.terms))


def granted_otherwise(name: str, limit: str, own: object, run: object) -> ContractMismatch:
    """The error for a learner with another `limit` than that with which tickets of run `name` were granted."""
    found = Difference(_OF_A_TICKET[limit], str(own), str(run))
    return not_this_run(name, [found], "tickets were granted with it, so only `cusearch reset` can change it")


def has_joined(name: str, own: Identity, run: Identity, accepts_changes: bool = False) -> bool:
    """Whether `run` is the run of this process; False while Redis has no contract. SERVED does not count for a process
    that has not asked its retriever yet. Raises: ContractMismatch when it is another."""
    asked = own if SERVED in own.terms or SERVED not in run.terms else own.with_retriever(run.terms[SERVED])
    refused = refusal(name, asked, run, accepts_changes or not run.terms)
    if refused:
        raise refused
    return own.terms == run.terms


def fingerprint_of_questions(questions: Sequence[Question]) -> str:
    """Count and checksum of the questions in order: a ticket refers to a question by its index."""
    asked = [(question.id, question.text, question.answers, question.environment) for question in questions]
    return f"{len(questions)} ({checksum(asked)})"


def _fingerprint_of_model(location: str, tokenizer: Any) -> str:
    """Size of the tokenizer, and a checksum of tokenizer and config.json. Weights do not count: workers load those
    that the learner publishes, and the canary of a process's first adapter is of the base's, too."""
    from cusearch_async.models import config_bytes  # noqa: PLC0415  (imports transformers, which other commands do not need)

    config = {k: v for k, v in msgspec.json.decode(config_bytes(location)).items() if k not in _OF_A_COPY}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    words = tokenizer.get_vocab(), special, getattr(tokenizer, "chat_template", None)
    return f"{len(tokenizer)} tokens ({checksum((config, words))})"


def checksum(value: Any) -> str:
    """Of what msgpack can hold; the order of keys does not matter."""
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(value, order="deterministic"))
