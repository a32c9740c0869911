"""The page of a run: one HTML file with its style, its script, the charts' library and its data."""

from __future__ import annotations

import html
import json
import logging
import secrets
from functools import cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from cusearch_async.dashboard.episodes import groups_of
from cusearch_async.dashboard.facts import facts
from cusearch_async.dashboard.kept import KeptRun
from cusearch_async.errors import ConfigError, first_line
from cusearch_async.files import writing_output
from cusearch_async.replay.selection import RecordedStep

log = logging.getLogger(__name__)

VENDOR = ("uPlot.min.css", "uPlot.iife.min.js")


def page(title: str, data: dict[str, Any]) -> str:
    """`data`: `facts`, with `watches` where a server sends news, and `groups` and `live` where they are known."""
    return Template(asset("page.html")).substitute(
        title=html.escape(title),
        nonce=secrets.token_urlsafe(16),
        style=asset("vendor", VENDOR[0]) + asset("page.css"),
        script=asset("vendor", VENDOR[1]) + "\n" + asset("page.js"),
        data=as_script(data),
    )


def write_page(folder: Path, output: Path) -> None:
    """The page of a run as its folder keeps it, with the groups of its newest recorded step, if that can be read.

    Raises: ConfigError for a folder that is no run's, and when it cannot be written."""
    found = facts(KeptRun.read(folder))
    groups, newest = None, found["recorded"][-1:]
    try:
        groups = groups_of(RecordedStep.read(folder, *newest)) if newest else None
    except ConfigError as error:  # its model is gone, or the record is damaged
        log.warning("the page has no episodes: %s", first_line(error))
    text = page(found["name"], found | {"watches": False, "groups": groups})
    with writing_output(output, "the page"):
        output.write_text(text, encoding="utf-8")


def as_script(data: dict[str, Any]) -> str:
    """JSON that ends no script element and holds no control character, whatever its texts are."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def asset(*names: str) -> str:
    return resources.files(__package__).joinpath(*names).read_text(encoding="utf-8")
