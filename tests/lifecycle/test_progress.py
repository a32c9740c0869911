"""What takes long says so in the log."""

from __future__ import annotations

import logging
import threading

import pytest

from cusearch_async.lifecycle import progress
from cusearch_async.lifecycle.progress import log_waiting, next_line_s
from tests.conftest import wait_until


def test_what_blocks_says_what_it_is_and_how_long_it_lasts(monkeypatch, caplog):
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.05)
    caplog.set_level("INFO")
    with log_waiting(logging.getLogger(), "waiting for the model to be loaded"):
        wait_until(lambda: len(caplog.messages) >= 2, 20)
    assert set(caplog.messages) == {"waiting for the model to be loaded: 0 s"}
    assert "log_waiting" not in {thread.name for thread in threading.enumerate()}, "it has ended"


def test_a_long_wait_is_told_less_and_less_often():
    """On one screen: a model that takes four minutes to load filled two with the same line."""
    told = [0.0]
    while told[-1] < 300:
        told.append(next_line_s(told[-1]))
    assert told == [0, 5, 10, 20, 40, 80, 140, 200, 260, 320]


def test_what_is_done_at_once_says_nothing(caplog):
    caplog.set_level("INFO")
    with log_waiting(logging.getLogger(), "waiting"):
        pass
    assert not caplog.messages


def test_an_interruption_while_it_begins_leaves_no_thread(monkeypatch):
    """It logged its wait for as long as the process lived."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), log_waiting(logging.getLogger(), "waiting"):
        raise AssertionError("not reached")
    assert "log_waiting" not in {thread.name for thread in threading.enumerate()}
