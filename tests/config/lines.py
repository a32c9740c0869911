"""What a config is refused with."""

from __future__ import annotations

import re

import pytest

from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError


def error_of(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def pattern_of(message):
    """A regular expression for one line in which `.*` stands for anything and all else for itself."""
    return ".*".join(re.escape(part) for part in message.split(".*"))


def write_all(folder, *texts):
    paths = [folder / f"{number}.toml" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return paths
