"""Agents written with SDKs, unmodified, in a separate environment (`make setup-sdks`)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cusearch_async.agents import episode as agent_episode
from tests.agents.test_episodes import Scene, calling, without_thoughts
from tests.conftest import SLOW

PYTHON = Path(os.environ.get("CUSEARCH_SDKS", ".venv-sdks")).absolute() / "bin" / "python"
PROGRAMS = Path(__file__).parent / "sdks"
pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is not there: make setup-sdks"),
]


@pytest.mark.parametrize("thought", ["", "<think>Hm.</think>"])
@pytest.mark.parametrize(
    ("program", "settings"),
    [
        (("with_openai_agents.py",), {}),
        (("with_openai_agents.py", "stream"), {}),
        (("with_anthropic.py",), {}),
        (("with_anthropic.py", "stream"), {}),
        (("with_smolagents.py",), {"ignores": ("tool_choice",), "max_prompt_tokens": 8000, "max_turn_tokens": 400}),
    ],
)
async def test_what_an_agent_of_an_sdk_was_given_and_said_is_trained_on(program, settings, thought, monkeypatch):
    monkeypatch.setattr(agent_episode, "parser_of", lambda *_: without_thoughts)
    final = "5"
    if "smol" in program[0]:  # it answers with a tool
        final = calling("5").replace('"search"', '"final_answer"').replace('"query"', '"answer"')
    turns = [calling("Pinsk"), calling("Belarus", text="Next. "), final]
    scene = Scene(
        [thought + turn for turn in turns], command=(str(PYTHON), str(PROGRAMS / program[0]), *program[1:]), **settings
    )
    trajectory = await scene.run()
    assert (trajectory.prediction, trajectory.reward, trajectory.turns, trajectory.depth) == ("5", 1.0, 3, 2)
    assert len(trajectory.starts) == (3 if "smol" in program[0] else 1), "smolagents writes its history anew each time"
    sampled = trajectory.token_ids[trajectory.sampled]
    assert sampled.tolist() == [token for turn in scene.policy._turns for token in turn]
    assert scene.text(trajectory).index("Pinsk is in Belarus.") > 0


def test_two_episodes_at_once_of_one_sdk_ask_each_its_own_address():
    """As docs/agents.md says: with a default client the second episode's address would be the first one's, too."""
    command = [str(PYTHON), str(PROGRAMS / "two_at_once.py")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120 * SLOW)
    assert done.stdout == "each its own\n"


@pytest.mark.parametrize("how", [(), ("stream",)])
async def test_a_turn_that_is_cut_ends_the_episode_without_an_answer_though_the_sdk_raises(how):
    command = (str(PYTHON), str(PROGRAMS / "with_openai_agents.py"), *how)
    trajectory = await Scene(["It is long and lateCUT"], command=command, max_turn_tokens=6).run()
    assert (trajectory.prediction, trajectory.turns, trajectory.cut_turns) == (None, 1, 1)
