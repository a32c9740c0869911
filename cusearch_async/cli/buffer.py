"""`cusearch buffer ls|peek|export CONFIG`: inspect single trajectories of a live run. `requeue`, `quarantine`, `pause`
and `resume` change the run."""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cusearch_async.cli.parts.arguments import add_config, add_trust, at_least, finite
from cusearch_async.cli.parts.opening import open_run
from cusearch_async.cli.parts.terminal import cut, plain
from cusearch_async.config import CONFIG_HELP, Config, load_config
from cusearch_async.dashboard.actions import BY_OPERATOR, act
from cusearch_async.dashboard.episodes import spans
from cusearch_async.errors import ConfigError
from cusearch_async.files import refuse_unwritable, writing_output
from cusearch_async.surrogates import visible
from cusearch_async.transport.interface import Filter, TrajectoryRow
from cusearch_async.types import Trajectory

log = logging.getLogger(__name__)

ENVIRONMENT, PROMPT, UNLIKELY_TOKEN = "magenta", "dim", "underline bold"
"""Styles that can be read on dark and on light terminals; the model's text has the terminal's own colour."""
HALF = "\N{REPLACEMENT CHARACTER}"
"""Tokenizers decode an incomplete character to this."""
ID = re.compile(r"\d+:\d+")
UNLIKELY = -2.0
"""Sampled tokens below this log-probability are marked."""


def add(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="list buffered trajectories")
    export = actions.add_parser("export", help="write buffered trajectories as JSON lines")
    for action in (listing, export):
        add_config(action)
        action.add_argument("--depth", type=at_least(0), help="only this search depth")
        action.add_argument("--min-staleness", type=at_least(0), help="at least this many steps behind the learner")
        action.add_argument("--min-reward", type=finite, help="at least this reward")
        action.add_argument("--max-reward", type=finite, help="at most this reward")
        action.add_argument("--text", help="text in the question (case-insensitive)")
    listing.add_argument("--limit", type=at_least(1), default=20, help="most rows to show (20)")
    export.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    peek = actions.add_parser("peek", help="show one trajectory: turns, passages, mask, log-probabilities")
    requeue = actions.add_parser("requeue", help="take a ticket from its worker, or reopen an incomplete group")
    out = actions.add_parser("quarantine", help="list quarantined trajectories; with an id, quarantine that one")
    for action in (peek, requeue):
        add_config(action)
    peek.add_argument("trajectory", help="its id, TICKET:ROLLOUT")
    requeue.add_argument("what", metavar="ticket", help="its number")
    text = f"{CONFIG_HELP}; behind it the id of a buffered trajectory, TICKET:ROLLOUT, if one is to be taken out"
    out.add_argument("config", type=Path, nargs="+", help=text)
    add_trust(out)
    out.add_argument("--reason", help="the reason to store with it")
    add_config(actions.add_parser("pause", help="start no new episodes; episodes in flight continue"))
    add_config(actions.add_parser("resume", help="start episodes again"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    if arguments.action == "quarantine":
        arguments.what = str(arguments.config.pop()) if ID.fullmatch(str(arguments.config[-1])) else ""
        if not arguments.config:
            raise ConfigError(f"the config is missing: cusearch buffer quarantine CONFIG {arguments.what}")
        if arguments.reason is not None and not arguments.what:
            raise ConfigError("--reason needs the id of a trajectory, TICKET:ROLLOUT, behind the config")
    config = load_config(arguments.config, overrides)
    looks = {"ls": ls, "export": export, "peek": peek}
    asyncio.run(looks.get(arguments.action, change)(config, arguments))


def _filter(arguments: argparse.Namespace) -> Filter:
    return Filter(**{name: getattr(arguments, name) for name in Filter.__dataclass_fields__})


async def ls(config: Config, arguments: argparse.Namespace) -> None:
    shown: list[TrajectoryRow] = []
    async with open_run(config) as buffer:
        async for row in buffer.rows(_filter(arguments)):
            shown.append(row)
            if len(shown) == arguments.limit:
                break
    Console().print(table(shown))
    if len(shown) == arguments.limit:
        Console().print(f"these are the first {arguments.limit}; use --limit to show more")


def table(found: list[TrajectoryRow]) -> Table:
    """One line a trajectory: `peek` shows the whole texts, and the worker."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=True)
    for name in ("id", "depth", "stale", "reward", "turns", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, ratio in (("question", 3), ("answered", 1)):
        table.add_column(name, ratio=ratio, no_wrap=True, overflow="ellipsis")
    for row in found:
        f = row.fields
        numbers = (f["depth"], str(row.staleness), f"{float(f['reward']):.2f}", f["turns"], f["tokens"])
        table.add_row(row.id, *numbers, *(cut(f[name] or "–") for name in ("question", "prediction")))
    return table


async def export(config: Config, arguments: argparse.Namespace) -> None:
    count = 0
    refuse_unwritable(arguments.output, "--output", ".jsonl")
    async with open_run(config) as buffer:
        with writing_output(arguments.output, "--output"), arguments.output.open("wb") as file:
            async for row in buffer.rows(_filter(arguments)):
                found = await buffer.fetch(row.id)
                if found is not None:
                    file.write(msgspec.json.encode(as_json(found[0])) + b"\n")
                    count += 1
    log.info("wrote %d trajectories to %s", count, arguments.output)


def as_json(trajectory: Trajectory) -> dict[str, Any]:
    values = {name: getattr(trajectory, name) for name in Trajectory.__slots__}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


async def peek(config: Config, arguments: argparse.Namespace) -> None:
    from cusearch_async.models import load_tokenizer  # noqa: PLC0415  (transformers only where it is needed)

    async with open_run(config) as buffer:
        found = await buffer.fetch(arguments.trajectory)
    if found is None:
        name = arguments.trajectory
        raise ConfigError(f"run {config.run.name!r} has no trajectory {name!r}; `cusearch buffer ls` lists them")
    trajectory, fields = found
    tokenizer = load_tokenizer(config.model.location)
    console = Console()
    console.print(overview(trajectory, fields))
    for panel in turns(trajectory, tokenizer):
        console.print(panel)


def overview(trajectory: Trajectory, fields: dict[str, str]) -> Table:
    shown = Table(box=None, show_header=False, pad_edge=False)
    versions = f"{trajectory.versions.min()} to {trajectory.versions.max()}"
    for name, value in (
        ("trajectory", f"{trajectory.id}, {fields.get('state', '?')}, by {trajectory.worker}"),
        ("environment", f"{trajectory.environment}, question {trajectory.question_id}"),
        ("question", trajectory.question),
        ("gold answers", " | ".join(trajectory.answers)),
        ("answered", trajectory.prediction or "–"),
        ("reward", f"{trajectory.reward:.3f}  (EM {trajectory.em:g}, F1 {trajectory.f1:.3f})"),
        ("format", "valid" if trajectory.format_valid else "invalid"),
        ("search depth", f"{trajectory.depth}, {trajectory.retrieval_tokens} retrieval tokens"),
        ("tokens", f"{len(trajectory.token_ids)}, {trajectory.sampled_tokens} sampled, by versions {versions}"),
        ("time", f"{trajectory.episode_s:.1f} s, {trajectory.search_s:.1f} s of it searching"),
        *([("stderr", trajectory.stderr)] if trajectory.stderr else []),
    ):
        shown.add_row(Text(name, style="bold"), plain(value))
    return shown


def turns(trajectory: Trajectory, tokenizer: Any) -> list[Panel]:
    """The prompt, the model's turns and the observations, one box each."""
    panels, logprobs = [], trajectory.logprobs
    for author, ids in spans(trajectory):
        if author == "model":
            own, logprobs = logprobs[: len(ids)], logprobs[len(ids) :]
            title = f"model: {len(ids)} tokens, trained on; mean log-probability {own.mean():.2f}"
            panels.append(Panel(marked(ids, own, tokenizer), title=title, border_style="green"))
        else:
            style = PROMPT if author == "prompt" else ENVIRONMENT
            text = plain(tokenizer.decode(ids, skip_special_tokens=False).strip(), style)
            panels.append(Panel(text, title=f"{author}: {len(ids)} tokens, masked", border_style=style))
    return panels


def marked(ids: list[int], logprobs: np.ndarray[Any, Any], tokenizer: Any) -> Text:
    """The text of a turn; unlikely tokens are underlined."""
    text, before, is_unlikely = Text(), "", False
    for count, logprob in enumerate(logprobs, start=1):
        # A piece is what this token adds to the text. Tokens that end inside a character wait for the rest of it.
        now = tokenizer.decode(ids[:count], skip_special_tokens=False)
        is_unlikely = is_unlikely or logprob < UNLIKELY
        if now.endswith(HALF) and count < len(ids):
            continue
        text.append(visible(now[len(before) :]), style=UNLIKELY_TOKEN if is_unlikely else "")
        before, is_unlikely = now, False
    text.rstrip()
    return text


async def change(config: Config, arguments: argparse.Namespace) -> None:
    """Raises: ConfigError when the run cannot be changed so, as it is now."""
    what, reason = getattr(arguments, "what", ""), getattr(arguments, "reason", None) or BY_OPERATOR
    async with open_run(config) as buffer:
        if arguments.action == "quarantine" and not what:
            taken_out = await buffer.quarantined()
            for id_, why in sorted(taken_out.items()):
                Console().print(plain(f"{id_}  {why}"))
            log.info("%d trajectories are quarantined", len(taken_out))
            return
        log.info("%s", await act(buffer, config.run.name, config.folder, arguments.action, what, reason))
