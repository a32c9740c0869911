"""The page of a run: one HTML file with its style, its script, the charts' library and its data."""

from __future__ import annotations

import html
import json
import secrets
from functools import cache
from importlib import resources
from string import Template
from typing import Any

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


def as_script(data: dict[str, Any]) -> str:
    """JSON that ends no script element and holds no control character, whatever its texts are."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def asset(*names: str) -> str:
    return resources.files(__package__).joinpath(*names).read_text(encoding="utf-8")
