"""`cusearch index CONFIG`: builds the index of the retriever's corpus."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from cusearch_async.cli.parts.arguments import add_config
from cusearch_async.config import EMBEDDED, load_config
from cusearch_async.errors import ConfigError
from cusearch_async.files import refuse_unwritable
from cusearch_async.lifecycle.placement import configure_process
from cusearch_async.retrieval.manifest import MANIFEST


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    settings = load_config(arguments.config, overrides).retriever
    if settings.index is None or settings.corpus in EMBEDDED:
        raise ConfigError(
            "retriever.index must name the folder to write, and retriever.corpus must name a file (the embedded "
            f"corpus is indexed in memory); got index {settings.index} and corpus {settings.corpus!r}"
        )
    refuse_unwritable(settings.index / MANIFEST, "retriever.index")  # the corpus takes up to an hour to read
    configure_process([])
    from cusearch_async.retrieval import indexing  # noqa: PLC0415  (libraries read the settings above when loaded)
    from cusearch_async.retrieval.corpus import Corpus  # noqa: PLC0415

    indexing.check(settings)
    console = Console()
    started = time.monotonic()
    with Progress(console=console) as progress:
        read = progress.add_task("reading (bytes)", total=None)
        corpus = Corpus(Path(settings.corpus), lambda done, total: progress.update(read, completed=done, total=total))
        making = progress.add_task(f"indexing ({settings.backend})", total=len(corpus))
        indexing.build(corpus, settings.index, settings, lambda done, total: progress.update(making, completed=done))
    console.print(f"{len(corpus)} passages indexed in {settings.index} in {time.monotonic() - started:.0f} s")
