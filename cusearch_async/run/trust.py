"""What a config in the folder of a run may do to who looks at it: import code, and direct secrets.

A config that a user names is the user's, one in the folder of a run may be somebody else's. Who only looks at a run
imports what such a config names, an environment or a transport, only with `--trust`: modules are searched in the
current folder too."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cusearch_async.config import VllmConfig, flat, saved_in, secret
from cusearch_async.config.toml import read_toml
from cusearch_async.errors import ConfigError
from cusearch_async.run.folder import STARTS

CODE = (
    *("method.name", "environment.LABEL.name", "environment.LABEL.reward", "environment.LABEL.agent", "loss.objective"),
    *("retriever.backend", "retriever.bm25.tokenizer", "redis.transport", "weights.transport"),
    "run.trackers",
)
"""Settings that may be package.module:Name."""
PROGRAMS = "environment.LABEL.command"
"""A setting that is a command line."""
ENGINE = "rollout.vllm."
"""The section of vLLM's options: it imports what some of them name."""
DIRECTED = {
    "redis.url": ("CUSEARCH_REDIS_PASSWORD", "CUSEARCH_SENTINEL_PASSWORD"),
    "retriever.web.url": ("SERPER_API_KEY", "SERPAPI_API_KEY"),
    "retriever.zerosearch.url": ("CUSEARCH_SIMULATOR_KEY",),
}
"""Settings to whose address these secrets of the environment are sent."""


def settings_in(folder: Path) -> Iterator[Path]:
    """The configs of a run: of the newest start, of the launch, and of every start."""
    yield from saved_in(folder)
    yield from sorted((folder / STARTS).glob("*.toml"))


def refuse_foreign(path: Path) -> None:
    """Raises: ConfigError for a config that names code, and for one of another user that directs a secret which is set.
    One that cannot be read is no concern here."""
    try:
        settings, is_own = read_toml(path, "config"), path.stat().st_uid == os.getuid()
    except (OSError, ConfigError):
        return
    for key, name in code_in(settings):
        remedy = "add --trust to import it, if you know where the folder comes from"
        raise ConfigError(f"{path} is in the folder of a run and names code, {key} = {name!r}; {remedy}")
    for key, value in [] if is_own else flat(settings):
        for variable in filter(secret, DIRECTED.get(key, ())):
            sent = f"{variable} would be sent to its {key} {value!r}"
            raise ConfigError(f"{path} is another user's, and {sent}; unset it, or add --trust if that is right")


def code_in(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, package.module:Name) of all code that a config names, and (key, command line) of its programs; for vLLM's
    options that are not ours every text may be a name. `settings` as read from TOML."""
    code, programs = ([re.escape(setting).replace("LABEL", ".*") for setting in some] for some in (CODE, [PROGRAMS]))
    for key, value in flat(settings):
        names = value if isinstance(value, list) else [value]
        if any(re.fullmatch(pattern, key, re.DOTALL) for pattern in code):
            yield from ((key, name) for name in names if isinstance(name, str) and ":" in name)
        if value and any(re.fullmatch(pattern, key, re.DOTALL) for pattern in programs):
            yield key, " ".join(map(str, names))
        option = key.removeprefix(ENGINE).partition(".")[0]
        if key.startswith(ENGINE) and option not in VllmConfig.model_fields:
            yield from ((key, name) for name in names if isinstance(name, str))
