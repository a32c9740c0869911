"""`cusearch check CONFIG`: what a run will take and meet, before anything is started.

Errors are what can never work. What is not there yet (a download, a service that is not up) is said, and no error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import try_to_load_from_cache
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cusearch_async import sizing
from cusearch_async.config import CONFIG_HELP, Config, RetrieverConfig, load_config
from cusearch_async.data.questions import file_of, load_questions
from cusearch_async.data.rows import HUB, hub_place
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle.placement import count_gpus
from cusearch_async.retrieval.corpus import read_start
from cusearch_async.retrieval.websearch import key_variable
from cusearch_async.rollout.dialogue import check_lengths
from cusearch_async.sizing import GIB, LearnerMemory, ModelShape
from cusearch_async.transport.server import is_listening

Status = Literal["ok", "warning", "error", "not reachable"]
STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "error": "bold red", "not reachable": "cyan"}

TIGHT = 0.9
"""An estimate above this share of a GPU may turn out too small."""
PASSAGES = 10_000
"""Of a corpus, so many are read."""
MEAN_LENGTH = 0.5
"""Of the longest episode; most end with an answer well before."""


@dataclass(frozen=True, slots=True)
class Finding:
    status: Status
    what: str
    text: str


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help=CONFIG_HELP)
    parser.add_argument("--gpu-gib", type=_gib, default=80.0, help="memory of one GPU, in GiB (80)")
    parser.set_defaults(run=run)


def _gib(text: str) -> float:
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a size in GiB, like 80, got {text!r}")
    return gib


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, overrides)
    gpu_bytes = int(arguments.gpu_gib * GIB)
    shape = _known_shape(config)
    findings = list(check(config, shape, gpu_bytes))
    console = Console()
    console.print(table(findings))
    if shape is not None:
        console.print(stages(config, shape, gpu_bytes))
    if any(finding.status == "error" for finding in findings):
        sys.exit(1)


def _known_shape(config: Config) -> ModelShape | None:
    return sizing.shape_of(config.model.location) or sizing.PUBLISHED.get(config.model.path)


def check(config: Config, shape: ModelShape | None, gpu_bytes: int) -> Iterator[Finding]:
    """All findings, in the order of the table."""
    yield _lengths(config, shape)
    found, tokenizer = _tokenizer(config)
    yield found
    yield from _batch(config)
    if shape is not None:
        yield _learner_memory(config, shape, gpu_bytes)
        yield _worker_memory(config, shape, gpu_bytes)
    yield _staleness(config)
    yield _gpus(config)
    yield from _gpus_here(config)
    yield from _files(config, tokenizer)
    yield from _services(config)


def table(findings: list[Finding]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for name in ("", "what", "finding"):
        shown.add_column(name, overflow="fold")
    for finding in findings:
        shown.add_row(Text(finding.status, style=STYLES[finding.status]), Text(finding.what), Text(finding.text))
    return shown


def stages(config: Config, shape: ModelShape, gpu_bytes: int) -> Table:
    """A learner rank's memory in GiB, one column per ZeRO stage; the chosen one is marked."""
    shown = Table(title=f"GiB per learner GPU, {config.learner.ranks} ranks", title_justify="left", pad_edge=False)
    parts = ("weights", "reference", "optimizer", "gradients", "buffers", "step", "activations", "peak")
    memories = [_memory(config, shape, stage) for stage in range(4)]
    shown.add_column("ZeRO stage")
    for stage in range(4):
        is_chosen = stage == config.learner.zero_stage
        name = f"{stage} (chosen)" if is_chosen else str(stage)
        shown.add_column(name, justify="right", style="bold" if is_chosen else "")
    for part in parts:
        shown.add_row(part, *(f"{getattr(memory, part) / GIB:.1f}" for memory in memories))
    fits = ("yes" if memory.peak <= gpu_bytes else "no" for memory in memories)
    shown.add_row(f"fits {gpu_bytes / GIB:g}", *fits)
    return shown


# --- model and batch ----------------------------------------------------------------------------------


def _lengths(config: Config, shape: ModelShape | None) -> Finding:
    longest = config.episode.max_tokens
    if shape is None:
        text = (
            f"an episode can take {longest} tokens; the context and the memory of {config.model.path!r} are not known "
            "here, because its config is not on this machine or of a kind other than qwen2 and llama"
        )
        return Finding("not reachable", "longest episode", text)
    text = (
        f"{longest} tokens (episode.max_prompt_tokens + (s_max + 1) max_turn_tokens + s_max max_observation_tokens), "
        f"the context of {config.model.path!r} is {shape.context}"
    )
    if longest > shape.context:
        return Finding("error", "longest episode", f"{text}; lower one of them")
    return Finding("ok", "longest episode", text)


def _tokenizer(config: Config) -> tuple[Finding, Any]:
    """And the tokenizer itself, where it is on this machine."""
    from cusearch_async.models import is_local, load_tokenizer, read_config  # noqa: PLC0415  (transformers only where it is needed)

    location = config.model.location
    if is_local(location) and not Path(location).exists():
        text = (
            f"model.path {location!r} is not on this machine; give a model's folder, or a Hub id like Qwen/Qwen2.5-3B"
        )
        return Finding("not reachable", "tokenizer", text), None
    if not is_local(location) and not Path(location).exists():
        cached = [try_to_load_from_cache(location, name) for name in ("config.json", "tokenizer_config.json")]
        if not all(isinstance(path, str) for path in cached):
            text = f"{location} is not on this machine; it is downloaded at the start"
            return Finding("not reachable", "tokenizer", text), None
    try:
        read_config(location)
        tokenizer = load_tokenizer(location)
    except ConfigError as error:
        return Finding("error", "tokenizer", str(error)), None
    return Finding("ok", "tokenizer", f"{len(tokenizer)} tokens in {location}"), tokenizer


def _batch(config: Config) -> Iterator[Finding]:
    settings, minibatch = config.method, config.loss.minibatch
    generated = _generated(config)
    takes_all = settings.make().trains_on_all
    trained = generated if takes_all else settings.budget
    text = (
        f"{settings.name} trains on {'up to ' if takes_all else 'K = '}{trained} of {generated} trajectories a step "
        f"({config.questions_per_step} questions x {config.pool.rollouts}): {-(-trained // minibatch)} updates of at "
        f"most M = {minibatch}"
    )
    if config.learner.ranks > minibatch:
        text += f"; {config.learner.ranks - minibatch} of learner.ranks = {config.learner.ranks} never have any work"
        yield Finding("warning", "batch", text)
    else:
        yield Finding("ok", "batch", text)
    if not takes_all:
        share = sizing.singleton_share(config.questions_per_step, config.pool.rollouts, trained)
        text = (
            f"{share:.0%} of the selected are expected to be alone in their group, as long as depth does not go by "
            f"group; method.singleton = {settings.singleton!r} says what they get"
        )
        yield Finding("ok", "singletons", text)


def _generated(config: Config) -> int:
    """Trajectories of a step."""
    return config.questions_per_step * config.pool.rollouts


def _staleness(config: Config) -> Finding:
    rollout, most = config.rollout, config.pool.max_staleness
    generated = _generated(config)
    slow, fast = sizing.expected_staleness(rollout.workers, rollout.max_episodes, generated, most)
    ahead = sizing.steps_in_flight(rollout.workers, rollout.max_episodes, generated)
    text = (
        f"about {slow:.1f} steps where the workers are the slower side, {fast:.1f} where the learner is, never over "
        f"pool.max_staleness = {most}: {rollout.workers} x {rollout.max_episodes} episodes in flight are {ahead:.1f} "
        f"steps' worth, and {config.buffer_limit / generated:.1f} steps' worth may wait in the buffer"
    )
    return Finding("ok", "staleness", text)


# --- memory -------------------------------------------------------------------------------------------


def _memory(config: Config, shape: ModelShape, stage: int) -> LearnerMemory:
    learner = config.learner
    tokens = sizing.forward_tokens(
        learner.micro_batch_tokens, config.episode.max_tokens, config.loss.minibatch, learner.ranks
    )
    has_reference = config.loss.kl_coef > 0
    return sizing.learner_memory(
        shape, config.model.dtype, stage, learner.ranks, has_reference, tokens, learner.gradient_checkpointing
    )


def _learner_memory(config: Config, shape: ModelShape, gpu_bytes: int) -> Finding:
    stage = config.learner.zero_stage
    memory = _memory(config, shape, stage)
    text = (
        f"ZeRO stage {stage} of {config.learner.ranks} ranks takes {memory.peak / GIB:.1f} of {gpu_bytes / GIB:g} GiB "
        f"a GPU, {memory.held / GIB:.1f} GiB of it all the time"
    )
    if memory.peak <= TIGHT * gpu_bytes:
        return Finding("ok", "learner memory", text)
    fitting = [s for s in range(4) if _memory(config, shape, s).peak <= TIGHT * gpu_bytes]
    if fitting:
        advice = f"learner.zero_stage = {fitting[0]} fits"
    else:
        advice = "more learner.ranks, learner.gradient_checkpointing or a smaller learner.micro_batch_tokens take less"
    status: Status = "error" if memory.peak > gpu_bytes else "warning"
    return Finding(status, "learner memory", f"{text}; {advice}")


def _worker_memory(config: Config, shape: ModelShape, gpu_bytes: int) -> Finding:
    rollout, dtype, longest = config.rollout, config.model.dtype, config.episode.max_tokens
    weights = shape.parameters * sizing.DTYPE_BYTES[dtype]
    room = sizing.kv_room(shape, dtype, gpu_bytes)
    if rollout.kv_cache_mib is not None:
        room = rollout.kv_cache_mib << 20
        if weights + room > gpu_bytes:
            text = (
                f"weights ({weights / GIB:.1f} GiB) and rollout.kv_cache_mib ({room / GIB:.1f} GiB) are more than a "
                f"GPU of {gpu_bytes / GIB:g} GiB holds"
            )
            return Finding("error", "KV cache", text)
    per_token = sizing.kv_bytes_per_token(shape, dtype)
    fitting = max(0, room) // (per_token * longest)
    at_once = min(rollout.max_sequences, rollout.max_episodes)
    text = (
        f"{max(0, room) / GIB:.1f} GiB beside {weights / GIB:.1f} GiB of weights hold {fitting} episodes of {longest} "
        f"tokens ({per_token} bytes a token); {at_once} are decoded at once"
    )
    if not fitting:
        return Finding("error", "KV cache", f"{text}; vLLM refuses to start without room for one")
    if fitting < MEAN_LENGTH * at_once:
        return Finding("warning", "KV cache", f"{text}; vLLM will throw out and compute again, lower max_sequences")
    return Finding("ok", "KV cache", text)


def _gpus(config: Config) -> Finding:
    learner = config.learner.gpus[: config.learner.ranks]
    rollout = config.rollout.gpus[: config.rollout.workers]
    evaluator = config.eval.gpus if config.eval.every else ()
    named = [*learner, *rollout, *evaluator]
    twice = sorted({gpu for gpu in named if named.count(gpu) > 1})
    if twice:
        text = (
            f"{', '.join(map(str, twice))} twice in learner.gpus {list(learner)}, rollout.gpus {list(rollout)} and "
            f"eval.gpus {list(evaluator)}; each process fills a GPU of its own"
        )
        return Finding("error", "GPUs", text)
    if bool(learner) != bool(rollout):
        empty = "rollout.gpus" if learner else "learner.gpus"
        return Finding("warning", "GPUs", f"{empty} is empty, which means all, also those that the other names")
    if named and config.eval.every and not evaluator:
        return Finding("warning", "GPUs", "eval.gpus is empty, which means all, also those that the others name")
    if not named:
        return Finding("ok", "GPUs", "none named: every process sees what the machine has")
    return Finding("ok", "GPUs", f"learner {list(learner)}, rollout {list(rollout)}, evaluator {list(evaluator)}")


def _gpus_here(config: Config) -> Iterator[Finding]:
    """A process whose GPU is not there ends; but a run may be checked on another machine than it is for."""
    retriever = config.retriever
    named = [*config.learner.gpus, *config.rollout.gpus, *config.eval.gpus]
    if retriever.dense.device.startswith("cuda") and (retriever.backend == "dense" or retriever.rerank.model):
        named.append(int(retriever.dense.device.partition(":")[2] or 0))
    there = count_gpus() if named else 0
    missing = sorted({gpu for gpu in named if gpu >= there})
    if missing:
        text = (
            f"{', '.join(map(str, missing))} of learner.gpus, rollout.gpus, eval.gpus and retriever.dense.device are "
            f"not there: CUDA finds {there} GPUs on this machine"
        )
        yield Finding("not reachable", "GPUs here", text)


# --- files and services -------------------------------------------------------------------------------


def _files(config: Config, tokenizer: Any) -> Iterator[Finding]:
    """What is on this machine is opened and read; of what is on the Hub, whether it is in the local cache."""
    for source in config.data.source:
        yield _questions("data.source", source, config, tokenizer)
    for source in config.eval.suite:
        yield _questions("eval.suite", file_of(source, config.eval.folder), config, tokenizer)
    retriever = config.retriever
    if retriever.backend in ("bm25", "dense"):
        yield _corpus(retriever)
        if retriever.index is not None:
            yield _index(retriever, retriever.index)


def _questions(key: str, source: str, config: Config, tokenizer: Any) -> Finding:
    """Read, and measured by the policy's tokenizer if that is known here."""
    if source.startswith(HUB):
        found = _hub_file(key, source)
        if found.status != "ok":
            return found
    elif source != "atlas" and not Path(source).exists():
        return Finding("not reachable", key, f"{source} is not there")
    try:
        questions = load_questions([source])
        if tokenizer is not None:
            check_lengths(questions, tokenizer, config.episode)
    except ConfigError as error:
        return Finding("error", key, str(error))
    return Finding("ok", key, f"{len(questions)} questions in {source}")


def _corpus(retriever: RetrieverConfig) -> Finding:
    key, name = "retriever.corpus", retriever.corpus
    if name == "atlas":
        return Finding("ok", key, "atlas, embedded")
    if not Path(name).exists():
        return Finding("not reachable", key, f"{name} is not there")
    try:
        read_start(Path(name), PASSAGES)
    except ConfigError as error:
        return Finding("error", key, str(error))
    return Finding("ok", key, f"{name}, of which the first {PASSAGES} passages at most were read")


def _index(retriever: RetrieverConfig, folder: Path) -> Finding:
    from cusearch_async.retrieval.indexing import STARTS  # noqa: PLC0415  (numba only where it is needed)

    if not folder.exists():
        text = f"{folder} is not there; make it with `cusearch index CONFIG`"
        return Finding("not reachable", "retriever.index", text)
    if not (folder / STARTS).is_file():
        text = f"{folder} holds no finished index; make it with `cusearch index CONFIG`"
        return Finding("error", "retriever.index", text)
    return Finding("ok", "retriever.index", f"{folder} holds an index; that it fits the corpus is checked at start")


def _hub_file(key: str, name: str) -> Finding:
    """`hf:OWNER/NAME/FILE`: in the local cache, or to be downloaded."""
    try:
        repository, file = hub_place(name, key)
        cached = try_to_load_from_cache(repository, file, repo_type="dataset")
    except (ConfigError, ValueError) as error:
        return Finding("error", key, str(error))
    if isinstance(cached, str):
        return Finding("ok", key, f"{name} is in the local cache")
    return Finding("not reachable", key, f"{name} is not on this machine; it is downloaded at the start")


def _services(config: Config) -> Iterator[Finding]:
    yield _service("redis.url", config.redis.url)
    retriever = config.retriever
    yield _service("retriever.url", retriever.url)
    if retriever.backend == "zerosearch":
        yield _service("retriever.zerosearch.url", retriever.zerosearch.url)
    if retriever.backend in ("serper", "serpapi"):
        key = key_variable(retriever.backend)
        is_set = bool(os.environ.get(key, "").strip())
        text = f"{key} is {'set' if is_set else 'missing'} here; the retriever process needs it"
        yield Finding("ok" if is_set else "warning", f"{retriever.backend} key", text)


def _service(key: str, url: str) -> Finding:
    if any(is_listening(place) for place in _places(url)):
        return Finding("ok", key, f"something listens at {url}")
    return Finding("not reachable", key, f"nothing listens at {url}")


def _places(url: str) -> list[str]:
    """The address itself, or every sentinel's."""
    scheme = "redis+sentinel://"
    if not url.startswith(scheme):
        return [url]
    hosts = url.removeprefix(scheme).partition("/")[0].rpartition("@")[2]
    return [f"redis://{host}" for host in hosts.split(",")]
