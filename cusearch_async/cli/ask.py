"""`cusearch ask RUN_FOLDER "QUESTION"`: what the agent that a run has trained does with a question, turn by turn; with
--before also what the model did that the run began with."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from cusearch_async.cli.parts.arguments import add_trust
from cusearch_async.cli.parts.live import whole_checkpoint
from cusearch_async.cli.parts.passes import answering_search, run_passes_with
from cusearch_async.config import Config, load_config
from cusearch_async.dashboard.episodes import coloured
from cusearch_async.data.questions import refuse_another_world
from cusearch_async.data.rows import tidy
from cusearch_async.errors import ConfigError, RetrievalUnavailable
from cusearch_async.evaluation.probing import Pass
from cusearch_async.lifecycle.children import CLI, free_port, start_child, why_it_ended
from cusearch_async.lifecycle.cuda import refuse_idle_cuda
from cusearch_async.lifecycle.placement import configure_process
from cusearch_async.lifecycle.signals import ending
from cusearch_async.overrides import settings_in
from cusearch_async.run.folder import refuse_no_run
from cusearch_async.surrogates import visible
from cusearch_async.transport.server import is_listening
from cusearch_async.types import Question, Trajectory

STYLES = {"think": "dim", "search": "bold cyan", "information": "magenta", "answer": "bold green"}
"""Of the blocks by their tags; those of other tags are `OTHER`. They can be read on dark and on light terminals."""
OTHER = "bold"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="such as runs/demo")
    parser.add_argument("question", metavar="QUESTION", help="in quotes")
    text = "model folder or Hub id; default: the run's newest checkpoint"
    parser.add_argument("--checkpoint", help=text)
    parser.add_argument("--before", action="store_true", help="also ask the model that the run began with")
    parser.add_argument("--gold", default="", help="the right answer, to be compared with")
    add_trust(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Raises: ConfigError."""
    refuse_no_run(arguments.folder)
    config = load_config([arguments.folder / "config.toml"], overrides)
    if not arguments.question.strip():
        raise ConfigError("the question must not be blank")
    models = {"before": config.model.location} if arguments.before else {}
    models["now"] = arguments.checkpoint or newest_model(config)
    configure_process([])
    from cusearch_async.processes.engines import check_policy  # noqa: PLC0415  (transformers only where it is needed)

    for model in models.values():
        check_policy(config, model, "--checkpoint" if model == arguments.checkpoint else "model.path")
    refuse_idle_cuda()
    gold = (arguments.gold,) if arguments.gold else ()
    if config.retriever.backend == "zerosearch" and not gold:
        raise ConfigError("give the right answer as --gold: with retriever.backend zerosearch searches depend on it")
    is_of_files = bool(config.sources_of(config.evaluated_in))  # an environment's own are asked as they are
    text = tidy(arguments.question) if is_of_files else arguments.question.strip()
    question = Question(id="asked", text=text, answers=gold, category="asked", environment=config.evaluated_in)
    console = Console()
    environments = {label: one.model_copy(update={"reward": None}) for label, one in config.environment.items()}
    config = config.model_copy(update={"environment": environments})  # a typed question has nothing that it could score
    with own_retriever(config, arguments.folder, overrides) as served:
        for when, model in models.items():
            episode = asyncio.run(ending(asked(served, model, question)))
            console.rule(Text(f"{when}: {visible(model)}", style="bold"), align="left")
            show(episode, model, console)


def newest_model(config: Config) -> str:
    """Raises: ConfigError without a checkpoint."""
    newest = whole_checkpoint(config)
    if newest is None:
        raise ConfigError(f"{config.folder} has no checkpoint yet; name a model with --checkpoint")
    return str(newest.path / "model")


@contextlib.contextmanager
def own_retriever(config: Config, folder: Path, overrides: list[str]) -> Iterator[Config]:
    """The config with a retriever that listens: the run's, or one that is started for this command; for `overrides` of
    its settings but the address always one.

    Raises: RetrievalUnavailable."""
    retriever = {name for name, _ in settings_in(overrides) if name.startswith("--retriever.")}
    is_another = bool(retriever) and "--retriever.url" not in retriever
    if not config.searching or (is_listening(config.retriever.url) and not is_another):
        yield config
        return
    if "--retriever.url" in retriever:
        url = config.retriever.url
        raise RetrievalUnavailable(f"nothing listens at --retriever.url {url}; start a retriever there")
    refuse_another_world(config)
    url = f"http://127.0.0.1:{free_port()}"
    command = [*CLI, "worker", "retriever", str(folder / "config.toml")]
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        child = start_child([*command, *overrides, "--retriever.url", url], {"PYTHONSAFEPATH": "1"}, Path(log.name))
        try:
            deadline = time.monotonic() + config.run.wait_s
            while not is_listening(url):
                if child.poll() is not None or time.monotonic() > deadline:
                    why = why_it_ended(Path(log.name)) or "it says nothing"
                    raise RetrievalUnavailable(f"the retriever did not start: {why}")
                time.sleep(0.1)
            yield config.model_copy(update={"retriever": config.retriever.model_copy(update={"url": url})})
        finally:
            child.terminate()
            child.wait()


async def asked(config: Config, model: str, question: Question) -> Trajectory:
    """Greedily."""
    async with answering_search(config) as search:
        (found,) = await run_passes_with(search, config, model, [Pass([question], 0.0)])
    (episode,) = found.episodes
    return episode


def show(episode: Trajectory, model: str, console: Console) -> None:
    """All but the prompt."""
    from cusearch_async.models import load_tokenizer  # noqa: PLC0415  (transformers only where it is needed)

    for author, pieces in coloured(episode, load_tokenizer(model)):
        if author in ("prompt", "stderr"):
            continue
        line = Text()
        for kind, text in pieces:
            if text.strip():
                line.append(visible(text.strip()), style=STYLES.get(kind, OTHER) if kind else "")
        console.print(line, soft_wrap=True)
    answer = "no answer" if episode.prediction is None else episode.prediction
    right = f", {'right' if episode.em else 'wrong'}" if episode.answers else ""
    searches = f"{episode.depth} search{'es' * (episode.depth != 1)}"
    console.print(Text(f"→ {visible(answer)} ({searches}{right})", style="bold"), soft_wrap=True)
