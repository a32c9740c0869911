"""`cusearch init FILE.toml`: writes a config for your own model, questions and passages on this machine.

In a terminal it asks for what is not given. An empty answer changes nothing of the shipped config."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from cusearch_async.cli.parts.terminal import plain
from cusearch_async.config import shipped_configs, with_overrides
from cusearch_async.config.retriever import EMBEDDED
from cusearch_async.config.section import NAME
from cusearch_async.data.files import PACKED, SUFFIXES
from cusearch_async.errors import ConfigError, first_line
from cusearch_async.extensions import as_list
from cusearch_async.files import refuse_unwritable, write_file, writing_output
from cusearch_async.lifecycle.cuda import count_gpus
from cusearch_async.paths import at_home

FITTING = {70: "one-gpu-80gb", 40: "one-gpu-48gb", 0: "one-gpu-24gb"}
"""GiB of a GPU, at least -> shipped config."""
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
        parser.add_argument(f"--{asked.option.replace('_', '-')}", metavar="X", help=asked.help)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> None:
    """Raises: ConfigError."""
    path: Path = arguments.file
    if path.suffix != ".toml" or not re.fullmatch(NAME, path.stem):
        raise ConfigError(f"name a .toml file by the name of the run, like mine.toml, got {path}")
    if path.exists():
        raise ConfigError(f"{path} exists; edit it, or name another")
    refuse_unwritable(path, "FILE.toml")
    base, gpus = base_here()
    console = Console(soft_wrap=True)
    console.print(
        f"based on the shipped config {base}" + (f", with the last of {gpus} GPUs for the learner" if gpus > 1 else "")
    )
    answers = {asked.option: getattr(arguments, asked.option) or _ask(asked) for asked in ASKED}
    try:
        text = written(base, path.stem, answers, gpus)
        values, content = tomllib.loads(text), text.encode()
    except ValueError as error:
        raise ConfigError(f"an answer holds what cannot be written: {first_line(error)}") from error
    with_overrides(values, [])
    with writing_output(path, "FILE.toml"):
        write_file(path, content)
    for remark in _remarks(answers):
        console.print(plain(remark, "yellow"))
    console.print(plain(f"wrote {path}; next:"))
    for command in _next(path, answers):
        console.print(plain(f"  {command}"))


def base_here() -> tuple[str, int]:
    """The shipped config for this machine: for its first GPU, or its CPU; and how many GPUs it has."""
    count = count_gpus()
    if not count:
        return WITHOUT_GPU, 0
    import torch  # noqa: PLC0415  (as in `count_gpus`)

    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    return next(name for least, name in FITTING.items() if gib >= least), count


def _ask(asked: Asked) -> str:
    try:
        return input(f"{asked.question} [as shipped]: ").strip() if sys.stdin.isatty() else ""
    except EOFError:  # ctrl-D: nothing more is answered
        return ""


def written(base: str, name: str, answers: dict[str, str], gpus: int) -> str:
    """The shipped config with the answers in it; an empty answer changes nothing. Of several GPUs the learner has the
    last, and a worker each of the others."""
    text = re.sub(r"\A(#.*\n)+", "", shipped_configs()[base].read_text(encoding="utf-8"))  # about the base
    text = f"# Written by `cusearch init`, from {base}. Every setting: `cusearch config {name}.toml`.\n" + text
    text = with_value(text, "run", "name", name)
    if gpus > 1:
        text = with_value(text, "learner", "gpus", [gpus - 1])
        text = with_value(text, "rollout", "gpus", list(range(gpus - 1)))
        text = with_value(text, "rollout", "workers", gpus - 1)
    if answers["model"]:
        text = with_value(text, "model", "path", answers["model"])
        text = re.sub(r"^(#.*\n)*trained_layers = .*\n", "", text, flags=re.MULTILINE)  # of the base's model
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


def with_value(text: str, section: str, key: str, value: str | int | list[str] | list[int]) -> str:
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
    left = [f"--{option.replace('_', '-')}" for option, answer in answers.items() if not answer]
    if left:
        yield f"as shipped: {', '.join(left)}"
    for option, answer in answers.items():
        for name in as_list(answer) if option in LISTS else [answer]:
            is_path = name.startswith(("/", ".", "~")) or Path(name).suffix in (*SUFFIXES, PACKED)
            if re.fullmatch(r"[\w.-]+:\d+", name):
                yield f"--{option}: {name} is taken for a file; the URL of a server begins with http://"
            elif is_path and ":" not in name and not Path(name).expanduser().exists():
                yield f"--{option.replace('_', '-')}: {name} does not exist yet"


def _next(path: Path, answers: dict[str, str]) -> list[str]:
    commands = []
    if answers["data"]:
        files = shlex.join(map(at_home, as_list(answers["data"])))
        commands.append(f"cusearch data check {files} --config {shlex.quote(str(path))}")
    if answers["passages"] and "://" not in answers["passages"] and answers["passages"] not in EMBEDDED:
        commands.append(f"cusearch index {shlex.quote(str(path))}")
    return [*commands, *(f"cusearch {command} {shlex.quote(str(path))}" for command in ("check", "launch"))]
