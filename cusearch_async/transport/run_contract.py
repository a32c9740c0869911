"""What all processes of a run must agree on: the run's contract, key by key.

The learner writes it into Redis when it takes the run over. A worker, an evaluator or a second learner that would
join with another value is refused, in one line that names the key, its own value and the run's. What may differ from
process to process (cores, concurrency, engine memory, addresses, timeouts) is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import xxhash
from pydantic import BaseModel

from cusearch_async.config import Config
from cusearch_async.errors import ContractMismatch
from cusearch_async.transport.codec import SCHEMA
from cusearch_async.types import Question

SETTINGS = (
    "run.seed",
    "model.dtype",
    "environment",
    "episode",
    "pool",
    "method",
    "retriever.backend",
    "retriever.topk",
    "retriever.distractors",
    "retriever.noise",
)
"""Settings that belong to the contract; a section stands for all that is in it."""
NOT_AGREED = ("episode.timeout_s",)
"""Settings of these sections that may differ from process to process."""
DATA, MODEL = "data.source", "model.path"
"""Settings that name files: what counts is a fingerprint of their content, wherever a process has them."""
ACCEPT_CHANGES = "--accept-changes"
"""The learner's option to go on with settings that change what the run means."""

_OF_A_COPY = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
"""Of a model's config.json, what two copies of one model may say differently. The run's dtype is model.dtype."""


@dataclass(frozen=True)
class RunContract:
    """Key -> text. Keys are those of the config where it has one."""

    terms: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Of all terms; empty for the contract without any."""
        return _checksum(dict(self.terms)) if self.terms else ""

    def differences(self, run: RunContract) -> list[str]:
        """In words, each term that is another one in the run's contract."""
        keys = [*self.terms, *sorted(run.terms.keys() - self.terms.keys())]
        pairs = ((key, self.terms.get(key, "not set"), run.terms.get(key, "not set")) for key in keys)
        return [f"{key} is {own} here and {there} in the run" for key, own, there in pairs if own != there]


NO_CONTRACT = RunContract()
"""Of an operator, who looks into runs and plays no part in them."""


def contract_of(config: Config, questions: Sequence[Question], tokenizer: Any) -> RunContract:
    """The contract of a process with this config, which has read these questions and this tokenizer.

    Raises: ConfigError when the model's config.json cannot be read."""
    terms = {key: repr(value) for name in SETTINGS for key, value in _settings(name, _value_of(config, name))}
    for label, environment in config.environment.items():
        terms[f"environment.{label}.template"] = _checksum(environment.prompt.text)
        del terms[f"environment.{label}.source"]  # the questions themselves are in the fingerprint of the data
    terms |= {
        DATA: _fingerprint_of_data(questions),
        MODEL: _fingerprint_of_model(config.model.location, tokenizer),
        "payload_schema": str(SCHEMA),
    }
    return RunContract({key: text for key, text in terms.items() if key not in NOT_AGREED})


def mismatch(name: str, own: RunContract, run: RunContract) -> ContractMismatch:
    """What to say to a process with the contract `own` that would join run `name`, whose contract is `run`."""
    if not run.terms:
        return ContractMismatch(
            f"Redis holds no contract of run {name!r}: an earlier version began it, or Redis has lost it; start the "
            "learner again, it writes one"
        )
    return ContractMismatch(
        f"this process does not fit run {name!r}: {', '.join(own.differences(run))}; start it with the settings, data "
        f"and version of the run (config.toml in its folder), or choose another run.name; only a learner can change "
        f"the run, with {ACCEPT_CHANGES}"
    )


def _value_of(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _settings(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of a setting, or of all settings of a section."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, Mapping):
        for part, inner in value.items():
            yield from _settings(f"{name}.{part}", inner)
    else:
        yield name, value


def _fingerprint_of_data(questions: Sequence[Question]) -> str:
    """Count and checksum of the questions in their order: a ticket stands for a question by its index."""
    asked = [(question.id, question.text, question.answers, question.environment) for question in questions]
    return f"{len(questions)} ({_checksum(asked)})"


def _fingerprint_of_model(location: str, tokenizer: Any) -> str:
    """Of the model's config.json and of what turns text into its tokens. Weights do not count: workers load what the
    learner publishes."""
    from cusearch_async.models import config_bytes  # noqa: PLC0415  (it brings transformers, and every command opens buffers)

    config = {k: v for k, v in msgspec.json.decode(config_bytes(location)).items() if k not in _OF_A_COPY}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    words = tokenizer.get_vocab(), special, getattr(tokenizer, "chat_template", None)
    return f"{len(tokenizer)} tokens ({_checksum((config, words))})"


def _checksum(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(value, order="deterministic"))
