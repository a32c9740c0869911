"""`make docs`: writes the parts of these pages that are made from the code, below their marker.

tests/test_docs.py fails where a page is not what this writes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from cusearch_async.cli.config import reference
from cusearch_async.cli.main import make_parser
from cusearch_async.metrics.table import as_markdown

DOCS = Path(__file__).parent
MARKER = "<!-- What follows is written by `make docs`. -->\n\n"


def commands() -> str:
    """Every sub-command with its arguments, as its --help has them."""
    return "\n".join(line for name, text, parser in _inner(make_parser()) for line in _command(name, text, parser))


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands,
    "configuration.md": partial(reference, None),
    "metrics.md": as_markdown,
}


def whole(name: str) -> str:
    """The page `name` as it should be."""
    by_hand = (DOCS / name).read_text(encoding="utf-8").partition(MARKER)[0]
    return by_hand + MARKER + PAGES[name]()


def _command(name: str, text: str, parser: argparse.ArgumentParser, heading: str = "##") -> Iterator[str]:
    yield f"{heading} cusearch {name}\n\n{text[0].upper()}{text[1:]}.\n"
    yield from _arguments(parser)
    for inner, inner_text, subparser in _inner(parser):
        yield from _command(f"{name} {inner}", inner_text, subparser, "###")


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    listed = [action for action in parser._actions if action.help not in (None, argparse.SUPPRESS)]
    shown = [action for action in listed if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)]
    for action in shown:
        name = ", ".join(action.option_strings) or str(action.metavar or action.dest).upper()
        takes = f" {action.metavar or action.dest.upper()}" if action.option_strings and action.nargs != 0 else ""
        yield f"- `{name}{takes}`: {(action.help or '') % vars(action)}"
    if shown:
        yield ""


def _inner(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Name, line of help and parser of each sub-command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                yield listed.dest, listed.help or "", action.choices[listed.dest]


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(whole(name), encoding="utf-8")
