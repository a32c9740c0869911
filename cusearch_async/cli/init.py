"""`cusearch init FILE.toml`: writes a config for your own model, questions and passages on this machine, or on one with
the GPUs of `--gpus`.

In a terminal it asks for what is not given. An empty answer changes nothing of the shipped config."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from cusearch_async.atlas.questions import WORLDS
from cusearch_async.cli.parts.arguments import parsed
from cusearch_async.cli.parts.terminal import plain
from cusearch_async.cli.preflight.shapes import shape_of
from cusearch_async.config import Config, LearnerConfig, shipped_configs, with_overrides
from cusearch_async.config.retriever import EMBEDDED
from cusearch_async.config.section import NAME
from cusearch_async.data.files import PACKED, SUFFIXES
from cusearch_async.errors import ConfigError, first_line
from cusearch_async.extensions import as_list
from cusearch_async.files import refuse_unwritable, write_file, writing_output
from cusearch_async.lifecycle.cuda import count_gpus
from cusearch_async.machine import usable_cores
from cusearch_async.paths import at_home

FITTING = {70: "one-gpu-80gb", 40: "one-gpu-48gb", 0: "one-gpu-24gb"}
"""GiB that a GPU has more of -> shipped config."""
WITHOUT_GPU = "laptop"


@dataclass(frozen=True, slots=True)
class Asked:
    option: str
    question: str
    help: str


ASKED = (
    Asked("model", "model, a Hub id or a folder", "Hub id or folder of the model"),
    Asked("data", "training questions, a file", "file of the training questions"),
    Asked("passages", "passages, a file, or the URL of your retriever", "corpus, or the URL of a /retrieve server"),
    Asked(
        "held_out", "held-out questions, a file or a benchmark like nq", "file of held-out questions, or a benchmark"
    ),
)

LISTS = ("data", "held_out")
"""Options whose answer may be several, separated by commas."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.toml", help="the config to write; the run is named like it")
    for asked in ASKED:
        parser.add_argument(_flag(asked.option), metavar="X", help=asked.help)
    size = parsed(_size, _is_size, "how many of how many GB, like 8x80, or 0")
    text = "write it for 8 GPUs of 80 GB, or with 0 for none, not for those here"
    parser.add_argument("--gpus", type=size, metavar="8x80", help=text)
    parser.set_defaults(run=run)


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _size(text: str) -> tuple[int, float]:
    count, gib = ("0", "0") if text == "0" else text.split("x")
    return int(count), float(gib)


def _is_size(given: tuple[int, float]) -> bool:
    count, gib = given
    return given == (0, 0) or (count > 0 and 0 < gib < math.inf)


def run(arguments: argparse.Namespace, _: list[str]) -> None:
    """Raises: ConfigError."""
    path: Path = arguments.file
    if path.suffix != ".toml" or not re.fullmatch(NAME, path.stem):
        raise ConfigError(f"name a .toml file by the name of the run, like mine.toml, got {path}")
    if path.exists():
        raise ConfigError(f"{path} exists; edit it, or name another")
    refuse_unwritable(path, "FILE.toml")
    gpus, gib = arguments.gpus or gpus_here()
    base = next(name for least, name in FITTING.items() if gib > least) if gpus else WITHOUT_GPU
    console = Console(soft_wrap=True)
    console.print(
        f"based on the shipped config {base}" + (f", with the last of {gpus} GPUs for the learner" if gpus > 1 else "")
    )
    answers = {asked.option: getattr(arguments, asked.option) or _ask(asked) for asked in ASKED}
    try:
        text = written(base, path.stem, answers, gpus)
        if base == WITHOUT_GPU:
            text = on_all_cores(text)
        if gpus and arguments.gpus:
            text = with_value(text, "run", "gpu_gib", gib)
        values = tomllib.loads(text)
        text.encode()  # an answer in another encoding
    except ValueError as error:
        raise ConfigError(f"an answer holds what cannot be written: {first_line(error)}") from error
    config = with_overrides(values, [])
    if base == WITHOUT_GPU:
        text = in_fastest_dtype(text, config, console)
    with writing_output(path, "FILE.toml"):
        write_file(path, text.encode())
    for remark in _remarks(answers):
        console.print(plain(remark, "yellow"))
    console.print(plain(f"wrote {path}; next:"))
    for step in _next(base, path, answers):
        console.print(plain(f"  {step}"))


def gpus_here() -> tuple[int, float]:
    """How many this machine has, and the GiB of the first."""
    count = count_gpus()
    if not count:
        return 0, 0.0
    import torch  # noqa: PLC0415  (as in `count_gpus`)

    return count, torch.cuda.get_device_properties(0).total_memory / 2**30


def _ask(asked: Asked) -> str:
    try:
        return input(f"{asked.question} [as shipped]: ").strip() if sys.stdin.isatty() else ""
    except EOFError:  # ctrl-D: nothing more is answered
        return ""


def written(base: str, name: str, answers: dict[str, str], gpus: int) -> str:
    """The shipped config with the answers in it; an empty answer changes nothing."""
    text = re.sub(r"\A(#.*\n)+", "", shipped_configs()[base].read_text(encoding="utf-8"))  # about the base
    text = f"# Written by `cusearch init`, from {base}. Every setting: `cusearch config {name}.toml`.\n" + text
    text = with_value(text, "run", "name", name)
    if gpus > 1:
        text = _divided(text, gpus, evaluates=bool(answers["held_out"]) and gpus > 2)
    if answers["model"]:
        text = with_value(text, "model", "path", answers["model"])
        text = _without(text, "trained_layers")  # of the base's model
    if answers["data"]:
        text = with_value(text, "data", "source", as_list(answers["data"]))
    if "://" in answers["passages"]:
        text = with_value(text, "retriever", "url", answers["passages"])
    elif answers["passages"]:
        text = with_value(text, "retriever", "corpus", answers["passages"])
        if answers["passages"] not in EMBEDDED:
            text = with_value(text, "retriever", "index", f"index-{name}")
    if answers["held_out"]:
        text = with_value(text, "eval", "suite", as_list(answers["held_out"]))
    return text


def on_all_cores(text: str) -> str:
    """The learner has half of this machine's cores, a worker the others; none by name where the process may use a share
    of the time of any: other containers may have the same names."""
    there, usable = sorted(os.sched_getaffinity(0)), usable_cores()
    if usable < max(2, len(there)):
        there = []
    half = len(there) // 2
    return with_value(with_value(text, "rollout", "cores", there[:half]), "learner", "cores", there[half:])


def in_fastest_dtype(text: str, config: Config, console: Console) -> str:
    """With the data type in which this machine's processor trains the model; as it is for a model that is not here."""
    from cusearch_async.cli.preflight import speed  # noqa: PLC0415  (imports torch)

    shape = shape_of(config.model)
    if shape is None:
        return text
    console.print("layers of the model are timed in float32 and bfloat16", end=": ")
    dtype = speed.fastest_dtype(config, shape)
    console.print(dtype)
    return with_value(text, "model", "dtype", dtype)


def _divided(text: str, gpus: int, evaluates: bool) -> str:
    """Of several GPUs the learner has the last, an evaluator the one before, and a worker each of the others. No engine
    has the learner's, so that none has a share only."""
    workers = gpus - 1 - evaluates
    text = with_value(text, "learner", "gpus", [gpus - 1])
    text = with_value(text, "rollout", "gpus", list(range(workers)))
    text = with_value(text, "rollout", "workers", workers)
    text = _without(_without(text, "gpu_memory_utilization"), "kv_cache_memory_bytes")
    if evaluates:
        text = with_value(text, "eval", "every", LearnerConfig().checkpoint_every)
        text = with_value(text, "eval", "gpus", [gpus - 2])
    return text


def _without(text: str, key: str) -> str:
    """TOML without the line of a key, and the comment above it."""
    return re.sub(rf"^(#.*\n)*{key} = .*\n", "", text, flags=re.MULTILINE)


def with_value(text: str, section: str, key: str, value: str | float | list[str] | list[int]) -> str:
    """TOML with a key of a section set, in the line where it stands, or in a new one at the end of the section."""
    line = f"{key} = {json.dumps(value, ensure_ascii=False)}"
    found = re.search(rf"^\[{re.escape(section)}\]\n((?:(?!\[).*\n)*)", text, re.MULTILINE)
    if found is None:
        return f"{text.rstrip()}\n\n[{section}]\n{line}\n"
    body, is_set = re.subn(rf"^{re.escape(key)} = .*$", lambda _: line, found[1], count=1, flags=re.MULTILINE)
    if not is_set:
        kept = body.rstrip("\n")
        body = f"{kept}\n{line}{body[len(kept) :]}" if kept else f"{line}\n{body}"
    return text[: found.start(1)] + body + text[found.end(1) :]


def _remarks(answers: dict[str, str]) -> Iterator[str]:
    """What was left as shipped, and what is not there."""
    left = [_flag(option) for option, answer in answers.items() if not answer]
    if left:
        yield f"as shipped: {', '.join(left)}"
    for option, answer in answers.items():
        for name in as_list(answer) if option in LISTS else [answer]:
            is_path = name.startswith(("/", ".", "~")) or Path(name).suffix in (*SUFFIXES, PACKED)
            if option == "passages" and re.fullmatch(r"[\w.-]+:\d+", name):
                yield f"--passages: {name} is taken for a file; the URL of a server begins with http://"
            elif is_path and ":" not in name and not Path(name).expanduser().exists():
                yield f"{_flag(option)}: {name} does not exist yet"


def _next(base: str, path: Path, answers: dict[str, str]) -> Iterator[str]:
    config, passages = shlex.quote(str(path)), answers["passages"]
    if files := [name for name in as_list(answers["data"]) if name and name not in WORLDS]:
        yield f"cusearch data check {shlex.join(map(at_home, files))} --config {config}"
    if "://" in passages:
        yield f"start your server at {passages}"
    elif passages and passages not in EMBEDDED:
        yield f"cusearch index {config}"
    yield f"cusearch check {config}"
    if base == WITHOUT_GPU:
        note = "unless the model knows the tags"
        yield f"cusearch warmstart {config} --demonstrations FILE.jsonl   # {note}"
    after = f"   # then with --model.path runs/{path.stem}-warmstart/model" if base == WITHOUT_GPU else ""
    yield f"cusearch launch {config}{after}"
