"""The last words of a child process, without vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cusearch_async.rollout.engine_output import EngineOutput
from tests.conftest import SLOW

DIES = """
import sys
print("starting", flush=True)
print("(EngineCore pid=7) ERROR 11-21 14:00:00 [core.py:9] ValueError: not this one", file=sys.stderr)
print("(EngineCore pid=7) ERROR 11-21 14:00:00 [core.py:9] RuntimeError: Unsupported head_dim=16", file=sys.stderr)
print("(EngineCore pid=7) ERROR 11-21 14:00:00 [core.py:9] shutting down", file=sys.stderr)
"""


@pytest.mark.system
@pytest.mark.parametrize(
    ("program", "words"), [(DIES, "RuntimeError: Unsupported head_dim=16"), ("print('all is well')", None)]
)
def test_the_last_error_of_a_child_is_kept_and_all_it_says_passed_on(capfd, program, words):
    output = EngineOutput()
    with output.listening():
        child = subprocess.Popen([sys.executable, "-c", program])
    assert child.wait(timeout=30 * SLOW) == 0
    assert output.last_error() == words
    print("ours again")
    out, err = capfd.readouterr()
    assert out == "ours again\n"
    assert ("starting" in err) == (words is not None)


def test_a_child_that_says_very_much_is_neither_held_up_nor_remembered_whole():
    output = EngineOutput()
    with output.listening():
        child = subprocess.Popen([sys.executable, "-c", "print('x' * 99 * 10_000 + 'ab\\n' * 200_000)"])
    assert child.wait(timeout=60 * SLOW) == 0
    assert len(output._lines) <= 500


@pytest.mark.system
def test_an_error_that_was_dealt_with_does_not_explain_a_later_death(capfd):
    output = EngineOutput()
    with output.listening():
        child = subprocess.Popen([sys.executable, "-c", DIES])
    assert child.wait(timeout=30 * SLOW) == 0
    assert output.last_error()
    output.forget()
    assert output.last_error() is None
