"""Agents that are processes: what they are given, what they say, and that none outlives its episode."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import psutil
import pytest

from cusearch_async.agents.episode import MOST_CHARACTERS, AgentRunner
from cusearch_async.config import EnvironmentConfig, EpisodeConfig
from cusearch_async.dashboard.episodes import stretches
from cusearch_async.environments.program import KEPT_BYTES, run_program
from cusearch_async.environments.task import Task
from cusearch_async.errors import ConfigError, EpisodeFailed
from cusearch_async.transport.codec import decode, encode
from tests.agents.templates import chat_tokenizer
from tests.agents.test_episodes import FOUND, QUESTION, parser  # noqa: F401  (a fixture)
from tests.conftest import SLOW
from tests.fakes import FakeSearch, ScriptedPolicy

PROGRAM = str(Path(__file__).with_name("program.py"))


TASK = Task(
    **dict.fromkeys(("question", "question_id", "base_url", "api_key", "model", "search_url"), "t"),
    search=FakeSearch({}).search,
)


def runner_of(how: str, *more: str, timeout_s: float = 600.0, s_max: int = 5, **own) -> AgentRunner:
    tokenizer = chat_tokenizer()
    policy = ScriptedPolicy(
        tokenizer,
        [turn + tokenizer.eos_token for turn in ("search: Pinsk", "search: Minsk" if how == "insists" else "5")],
    )
    command = (sys.executable, PROGRAM, how, *more)
    environment = EnvironmentConfig(name="agent", **({"command": command} | own)).make(FakeSearch(FOUND))
    return AgentRunner(policy, {"a": environment}, tokenizer, EpisodeConfig(timeout_s=timeout_s, s_max=s_max), seed=0)


async def episode(runner: AgentRunner):
    return await runner.run(QUESTION, 3, 1, "w")


@pytest.mark.parametrize("how", ["answers", "chatty"])
async def test_a_program_searches_and_its_last_line_is_its_answer(how, monkeypatch):
    monkeypatch.setenv("CUSEARCH_REDIS_PASSWORD", "of the run")
    trajectory = await episode(runner_of(how))
    assert (trajectory.prediction, trajectory.reward, trajectory.depth, trajectory.turns) == ("5", 1.0, 1, 2)
    assert "Pinsk is in Belarus." in chat_tokenizer().decode(trajectory.token_ids)


async def test_one_that_says_it_needs_no_retriever_is_told_so_when_it_asks():
    with pytest.raises(EpisodeFailed, match=r"environment\.LABEL\.searches is false"):
        await episode(runner_of("answers", searches=False))


@pytest.mark.parametrize("how", ["answers", "chatty"])
async def test_the_end_of_what_a_program_says_on_stderr_is_kept_with_the_trajectory(how):
    trajectory = await episode(runner_of(how))
    assert trajectory.stderr.strip().endswith("Where? is looked up")
    assert len(trajectory.stderr) <= KEPT_BYTES
    again = decode(encode(trajectory), max_tokens=10_000)
    assert again.stderr == trajectory.stderr
    assert ("stderr", trajectory.stderr) in stretches(again, chat_tokenizer())


@pytest.mark.parametrize("words", [3_000, 300_000])
async def test_a_long_answer_is_taken_whole_or_refused(words):
    """Before, it was cut at its front."""
    task = Task(question="?", question_id="q", base_url="", api_key="", model="", search=None, search_url="")
    script = f"print('thinking ' * 50_000); print('AAA' + ' b' * {words})"
    ending = await run_program([sys.executable, "-c", script], (), task)
    if words == 3_000:
        assert ending.result == "AAA" + " b" * words
    else:
        assert len(ending.result) > MOST_CHARACTERS, "which fails the episode"


async def test_so_is_how_it_fails_after_the_episodes_limit():
    """Which is no failure of the episode."""
    trajectory = await episode(runner_of("insists", s_max=1))
    assert (trajectory.prediction, trajectory.turns) == (None, 2)
    assert "ended with status 1: urllib.error.HTTPError: HTTP Error 400" in trajectory.stderr


async def test_a_program_that_has_ended_is_not_waited_for_though_another_holds_its_output():
    """As a server or a browser does that it has started, in its own session or not."""
    for how in ("leaves", "leaves alone"):
        async with asyncio.timeout(20 * SLOW):
            trajectory = await episode(runner_of(how))
        assert trajectory.prediction == "5"


async def test_a_program_inherits_no_secrets_but_those_that_it_is_passed(monkeypatch):
    kept = ("AWS_REGION_OF_THE_BUCKET", "HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "CUSEARCH_PAGE_TOKEN", "DB_PASSWORD")
    kept += ("DJANGO_SECRET_KEY", "S3_ACCESS_KEY", "OPENAI_KEY", "MYSQL_PWD", "GH_TOKEN_2", "github_token", "APIKEY")
    kept += ("PGPASSWORD", "PGPASSFILE", "SSHPASS", "MINIO_ACCESSKEY", "S3_SECRETKEY", "ACCESSTOKEN", "CLIENTSECRET")
    kept += ("GITHUB_PAT", "CI_JOB_JWT", "SLACK_WEBHOOK_URL", "SENTRY_DSN")
    for name in (*kept, "SERPER_API_KEY", "HOME_OF_IT", "TOKENIZERS_PARALLELISM", "KEYBOARD"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("DATABASE_URL", "postgres://me:x@host/db")
    monkeypatch.setenv("PLAIN_URL", "postgres://host:5432/db")
    show = "import os; print(sorted(name for name in os.environ if os.environ[name] == 'x' or '://' in os.environ[name]"
    show += " and name in ('DATABASE_URL', 'PLAIN_URL')))"
    ending = await run_program((sys.executable, "-c", show), ("SERPER_API_KEY",), TASK)
    assert ending.result == "['HOME_OF_IT', 'KEYBOARD', 'PLAIN_URL', 'SERPER_API_KEY', 'TOKENIZERS_PARALLELISM']"


async def test_a_program_finds_the_modules_beside_it(tmp_path, monkeypatch):
    """Though processes of a run are started without the folder of their code in sys.path."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    shutil.copy(PROGRAM, tmp_path / "beside.py")
    (tmp_path / "mine.py").write_text("import beside\n\nbeside.main()\n")
    trajectory = await episode(runner_of("", command=(sys.executable, str(tmp_path / "mine.py"), "answers")))
    assert trajectory.prediction == "5"


async def test_a_program_that_writes_no_answer_gives_none():
    trajectory = await episode(runner_of("silent"))
    assert (trajectory.prediction, trajectory.reward) == ("thinking …", 0.0), "the last line that is not empty"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((sys.executable, PROGRAM, "fails"), r"ended with status 1: there is no key for that"),
        ((sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"), r"ended with status -9: it wrote no error"),
        (("/nowhere/program",), r"/nowhere/program cannot be started: No such file"),
    ],
)
async def test_a_program_that_fails_says_why(command, message):
    with pytest.raises(EpisodeFailed, match=message):
        await episode(runner_of("", command=command))


async def test_no_program_outlives_its_episode(tmp_path):
    """Ended by its time, and by the worker's end."""
    said = tmp_path / "pid"

    async def begun() -> int:
        while not said.exists() or not said.read_text().strip():
            await asyncio.sleep(0.01)
        return int(said.read_text())

    with pytest.raises(EpisodeFailed, match=r"took longer than episode.timeout_s"):
        await episode(runner_of("hangs", str(said), timeout_s=5.0))
    assert not psutil.pid_exists(await begun())
    said.unlink()
    running = asyncio.ensure_future(episode(runner_of("hangs", str(said))))
    async with asyncio.timeout(30 * SLOW):
        process = await begun()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert not psutil.pid_exists(process)


@pytest.mark.parametrize("own", [{"command": ()}, {"agent": "tests.agents.programs:with_tools"}])
def test_an_agent_is_a_function_or_a_program(own):
    with pytest.raises(ConfigError, match=r"needs one of its settings agent, .*, command, .* and remote"):
        runner_of("x", **own)


def test_a_program_and_its_arguments_in_one_text_are_refused():
    """A path may have blanks, and be of another machine."""
    with pytest.raises(ValueError, match=r"'python a/b.py' is no program; separate its arguments by commas"):
        EnvironmentConfig(name="agent", command="python a/b.py")
    assert EnvironmentConfig(name="agent", command="/opt/my tools/agent, -q").command == ("/opt/my tools/agent", "-q")
