"""A config file to vary."""

from __future__ import annotations

import pytest


@pytest.fixture
def write(tmp_path):
    """A config file with a run name and the given TOML."""

    def write(text="", run='[run]\nname = "r"\n'):
        path = tmp_path / "run.toml"
        path.write_text(f"{text}\n{run}", encoding="utf-8")
        return path

    return write
