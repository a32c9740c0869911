"""`make docs`: writes the parts of these pages that are made from the code, below their marker; and the pictures.

tests/test_docs.py fails where a page or a picture is not what this writes."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from cusearch_async.alarms.rules import RULES
from cusearch_async.cli.config import reference
from cusearch_async.cli.main import make_parser
from cusearch_async.config import CONFIG_HELP
from cusearch_async.metrics.table import FAMILIES, Metric
from docs import alarm_pictures, healthy_bands, pictures
from tests.system.model_kinds import KINDS

DOCS = Path(__file__).parent
MARKER = "<!-- What follows is written by `make docs`. -->\n\n"
SEVERAL = 2
"""An argument of so many commands is explained once."""


def commands() -> str:
    """Every sub-command with its arguments, as its --help has them; what several take, once for all."""
    parser = make_parser()
    counts = Counter(_line(action) for inner in _descendants(parser) for action in _shown(inner))
    common = [line for line, count in counts.items() if count >= SEVERAL]
    pages = [line for name, text, inner in _inner(parser) for line in _command(name, text, inner, common)]
    return "\n".join(["Arguments of several:\n", *common, "", *pages])


def metrics() -> str:
    """Every metric of a learner step, by family."""
    lines = []
    for family in FAMILIES:
        lines += [f"## {family.title} (`{family.source}`)\n", *map(_metric, family.metrics), ""]
    return "\n".join(lines)


def alarms() -> str:
    """Every rule, with what to do."""
    rows = ["| alarm | fires at | what is wrong, and what to do | |", "|---|---|---|---|"]
    rows += [
        f"| `{rule.name}` | {rule.condition} | {rule.cause} {rule.remedy} | "
        f"![{rule.name}](images/alarms/{rule.name}.svg) |"
        for rule in RULES
    ]
    return "\n".join([*rows, ""])


def models() -> str:
    """The families that are tested, and those that are refused."""
    rows = ["| family | `model_type` | |", "|---|---|---|"]
    for kind in KINDS:
        rows.append(f"| {kind.name} | {kind.model_type} | {f'refused: {kind.why}' if kind.refused else 'trained'} |")
    return "\n".join([*rows, ""])


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands,
    "configuration.md": partial(reference, None),
    "metrics.md": metrics,
    "models.md": models,
    "operating.md": alarms,
}
PICTURES: dict[str, Callable[[], str]] = {
    "images/buckets.svg": pictures.buckets,
    "images/peek.svg": pictures.peek,
    "../cusearch_async/dashboard/healthy.json": healthy_bands.bands,
    **{f"images/alarms/{rule.name}.svg": partial(alarm_pictures.alarm, rule) for rule in RULES},
}


def whole(name: str) -> str:
    """The page or picture `name` as it should be."""
    if name in PICTURES:
        return PICTURES[name]()
    by_hand = (DOCS / name).read_text(encoding="utf-8").partition(MARKER)[0]
    return by_hand + MARKER + PAGES[name]()


def _metric(metric: Metric) -> str:
    return f"- `{metric.name}` ({metric.unit}): {metric.meaning}"


def _command(
    name: str, text: str, parser: argparse.ArgumentParser, common: list[str], heading: str = "##"
) -> Iterator[str]:
    shown = list(_shown(parser))
    known = [f"`{_name(action)}`" for action in shown if _line(action) in common]
    takes = f" Takes {', '.join(known)}." if known else ""
    yield f"{heading} cusearch {name}\n\n{text[0].upper()}{text[1:]}.{takes}\n"
    own = [line for line in map(_line, shown) if line not in common]
    yield from [*own, ""] if own else []
    for inner, inner_text, subparser in _inner(parser):
        yield from _command(f"{name} {inner}", inner_text, subparser, common, "###")


def _shown(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        is_told = action.help not in (None, argparse.SUPPRESS)
        if is_told and not isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            yield action


def _name(action: argparse.Action) -> str:
    return ", ".join(action.option_strings) or str(action.metavar or action.dest).upper()


def _line(action: argparse.Action) -> str:
    takes = f"={action.metavar or action.dest.upper()}" if action.option_strings and action.nargs != 0 else ""
    help_text = ((action.help or "") % vars(action)).removeprefix(f"{CONFIG_HELP}; ")
    return f"- `{_name(action)}{takes}`: {help_text}"


def _descendants(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for _, _, inner in _inner(parser):
        yield inner
        yield from _descendants(inner)


def _inner(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Name, line of help and parser of each sub-command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                yield listed.dest, listed.help or "", action.choices[listed.dest]


if __name__ == "__main__":
    for name in (*PAGES, *PICTURES):
        (DOCS / name).write_text(whole(name), encoding="utf-8")
