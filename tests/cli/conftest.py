from __future__ import annotations

import pytest

from cusearch_async.cli import main


@pytest.fixture
def cusearch(monkeypatch, capsys):
    """Runs a command in this process. Returns its exit status, or the line that it ends with, and its output."""

    def run(*words):
        monkeypatch.setattr("sys.argv", ["cusearch", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "200")
        try:
            main.main()
        except SystemExit as ended:
            return ended.code, capsys.readouterr().out
        return 0, capsys.readouterr().out

    return run
