"""The run contract: the settings and data that all processes of a run must share.

The learner writes it into Redis when it takes over the run. A worker, an evaluator or a second learner with another
value is refused, with one line that names the key, its own value and the run's value. Its settings are those whose
scope is SHARED (`config.section.Scope`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import xxhash

from cusearch_async.config import Config, Scope, flat, scope_of
from cusearch_async.errors import ContractMismatch
from cusearch_async.types import PAYLOAD_SCHEMA, Question

DATA, MODEL = "data.source", "model.path"
"""Settings that name files. The contract has a fingerprint of their content, so the paths may differ."""
SERVED = "retriever serves"
"""What the retriever says that it serves. No setting: the retriever is another process, with a config of its own."""
ACCEPT_CHANGES = "--accept-changes"
"""The learner's option to continue with settings that change what the run means."""

_OF_A_COPY = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
"""Keys of config.json that may differ between two copies of one model. The run's dtype is model.dtype."""


@dataclass(frozen=True)
class RunContract:
    """Key -> text. Keys are config keys where possible."""

    terms: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Checksum of all terms; empty without terms."""
        return _checksum(dict(self.terms)) if self.terms else ""

    def with_retriever(self, serves: str | None) -> RunContract:
        """The contract of a process that has asked its retriever what it serves; None when that does not say it."""
        return RunContract({**self.terms, SERVED: serves or "not reported"})

    def differences(self, run: RunContract) -> list[str]:
        """One text for each term that differs in the contract `run`."""
        keys = [*self.terms, *sorted(run.terms.keys() - self.terms.keys())]
        pairs = ((key, self.terms.get(key, "not set"), run.terms.get(key, "not set")) for key in keys)
        return [f"{key} is {own} here and {there} in the run" for key, own, there in pairs if own != there]


NO_CONTRACT = RunContract()
"""The contract of operator commands, which do not join the run."""


def contract_of(config: Config, questions: Sequence[Question], tokenizer: Any) -> RunContract:
    """The contract of a process with this config, these questions and this tokenizer.

    Raises: ConfigError when the model's config.json cannot be read."""
    settings = flat(config.model_dump(mode="json"))
    terms = {key: repr(value) for key, value in settings if scope_of(key) is Scope.SHARED}
    for label, environment in config.environment.items():
        terms[f"environment.{label}.template"] = _checksum(dataclasses.astuple(environment.prompt))
    terms |= {
        DATA: fingerprint_of_questions(questions),
        MODEL: _fingerprint_of_model(config.model.location, tokenizer),
        "payload_schema": str(PAYLOAD_SCHEMA),
    }
    return RunContract(terms)


def mismatch(name: str, own: RunContract, run: RunContract) -> ContractMismatch:
    """The error for a process with the contract `own` that tries to join run `name` with the contract `run`."""
    if not run.terms:
        return ContractMismatch(
            f"Redis holds no contract of run {name!r}, because it has lost it; start the learner again, it writes the "
            "contract"
        )
    return ContractMismatch(
        f"this process does not match run {name!r}: {', '.join(own.differences(run))}; start it with the settings, "
        f"data and version of the run (config.toml in its folder), or choose another run.name; only a learner can "
        f"change the run, with {ACCEPT_CHANGES}"
    )


def refuse_other_settings(name: str, own: RunContract, run: RunContract) -> None:
    """For a process that has not reached its retriever yet.

    Raises: ContractMismatch when anything else than what the retriever serves differs from run `name`'s contract."""
    served = {SERVED: run.terms[SERVED]} if SERVED in run.terms else {}
    asked = RunContract({**own.terms, **served})
    if run.terms and asked != run:
        raise mismatch(name, asked, run)


def fingerprint_of_questions(questions: Sequence[Question]) -> str:
    """Count and checksum of the questions in order: a ticket refers to a question by its index."""
    asked = [(question.id, question.text, question.answers, question.environment) for question in questions]
    return f"{len(questions)} ({_checksum(asked)})"


def _fingerprint_of_model(location: str, tokenizer: Any) -> str:
    """Size of the tokenizer, and a checksum of tokenizer and config.json. Weights do not count, because workers load
    the weights that the learner publishes."""
    from cusearch_async.models import config_bytes  # noqa: PLC0415  (imports transformers, which other commands do not need)

    config = {k: v for k, v in msgspec.json.decode(config_bytes(location)).items() if k not in _OF_A_COPY}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    words = tokenizer.get_vocab(), special, getattr(tokenizer, "chat_template", None)
    return f"{len(tokenizer)} tokens ({_checksum((config, words))})"


def _checksum(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(value, order="deterministic"))
