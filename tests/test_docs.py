"""Tables in the docs are true to the code."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import torch

from cusearch_async.algorithm.advantages import Advantages
from cusearch_async.algorithm.methods import METHODS, Candidates, NoMemory, PlansRollouts
from cusearch_async.cli.config import reference
from cusearch_async.config import known_keys, load_config
from cusearch_async.metrics import table
from cusearch_async.metrics.machine import describe_machine
from cusearch_async.metrics.step import (
    WorkerRates,
    describe_environments,
    describe_ledger,
    describe_server,
    describe_step,
    describe_times,
)
from cusearch_async.metrics.update import UpdateReport
from cusearch_async.run import folder as run_folder
from cusearch_async.transport.interface import Ledger, WorkerStatus
from cusearch_async.types import Pool
from docs.generate import PAGES, PICTURES, whole
from tests.strategies import make_pool, make_trajectory

DOCS = Path(__file__).parents[1] / "docs"
PACKAGE = DOCS.parent / "cusearch_async"


def method_table() -> dict[str, list[str]]:
    """Method -> the other columns of its row."""
    text = (DOCS / "algorithm.md").read_text(encoding="utf-8")
    section = text.split("| method | uses rewards to choose |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


def pool_of(rewards, depths) -> Candidates:
    return make_pool(depths, rewards, rollouts=3, tokens=np.arange(len(rewards)) + 10)


def method_of(name: str, budget: int):
    return METHODS[name](METHODS[name].Settings(), budget)


def select(name: str, pool: Candidates, budget: int = 12):
    method = method_of(name, budget)
    return method.select(pool, method.decode("", 5), np.random.default_rng(0))


def test_every_method_is_in_the_table_and_in_its_order():
    assert list(method_table()) == list(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_the_method_table_is_true(name):
    uses_rewards, generated, trained, state = method_table()[name]
    rng = np.random.default_rng(1)
    depths = rng.integers(0, 6, 60)
    pools = [pool_of(rng.choice([0.0, 0.2, 1.0], 60), depths) for _ in range(8)]
    selections = {tuple(select(name, pool).indices) for pool in pools}
    assert (len(selections) > 1) == (uses_rewards == "yes")

    method = method_of(name, 96)
    planned = (method.questions(64, 3), method.largest_group(3)) if isinstance(method, PlansRollouts) else (64, 3)
    assert generated.startswith("N·G") == (planned[0] == 64)
    assert ("K/G questions" in generated) == (planned[0] == 32)
    assert ("by its pass rate" in generated) == (planned[1] > 3)

    counts = {len(select(name, pool).indices) for pool in pools}
    assert trained.startswith("K") == (counts == {12})
    assert (trained == "all") == (counts == {60})

    deep = pool_of(np.zeros(60), np.full(60, 5))
    after = select(name, deep).memory
    assert (state == "phase k") == (getattr(after, "phase", 0) > 0)
    assert ("per question" in state) == bool(getattr(after, "visits", {}))
    assert (state == "–") == (after == NoMemory())


def test_every_metric_of_a_step_is_in_the_table_and_the_page_is_made_of_it():
    pool = Pool(0, (make_trajectory(0, recall=0.5), make_trajectory(1, em=0.0)))
    names = describe_step(pool, pool.trajectories, Advantages(np.zeros(1), 1, 0), 1, 5).keys()
    report = UpdateReport(5, torch.device("cpu"))
    report.sums += 1  # a token of each depth
    names |= report.metrics(1).keys()
    workers = dict.fromkeys("ab", WorkerStatus(sampled_tokens=1, busy_s=1, request_s=1, alive_s=1))
    names |= WorkerRates().since_last(workers).keys() | describe_ledger(Ledger()).keys()
    names |= describe_times(1, 1, 1, 1, 1, 1, 1).keys()
    names |= {name.replace("/a/", "/LABEL/") for name in describe_environments(pool, [], ["a", "b"]) if "/a/" in name}
    for method in METHODS:
        names |= {f"selection/{name}" for name in select(method, pool_of(np.zeros(60), np.ones(60, np.int64))).metrics}
    names |= describe_server(1, 2, 0.1).keys() | {"alarms/firing"}
    names |= describe_machine(DOCS).keys() | {"machine/gpu_used_share", "machine/gpu_memory_share"}
    learner = DOCS.parent / "cusearch_async" / "learner" / "learner.py"
    names |= set(re.findall(r'"(train/[a-z_]+)"', learner.read_text(encoding="utf-8")))
    assert names == table.names()


@pytest.mark.parametrize("name", [*PAGES, *PICTURES])
def test_a_generated_page_is_what_the_code_says(name):
    """`make docs` writes it."""
    assert (DOCS / name).read_text(encoding="utf-8") == whole(name)


def test_the_readme_is_short():
    """What does not fit belongs on a page of docs/."""
    assert len((DOCS.parent / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_pages_are_short():
    """Together, without those that are made from the code: say each fact once."""
    written = [page for page in DOCS.glob("*.md") if page.name not in PAGES]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in written) <= 17_000


def test_the_commits_that_benchmarks_name_exist():
    """A reader checks one out to measure again; a shallow clone or an archive has not all."""
    git = ["git", "-C", str(DOCS.parent)]
    if not (DOCS.parent / ".git").exists():
        pytest.skip("needs the history of git")
    asked = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], check=False, capture_output=True, text=True)
    if asked.stdout.strip() != "false":
        pytest.skip("needs the whole history of git")
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    named = re.findall(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8}\b", page)
    assert named
    for commit in named:
        subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], check=True)


def test_measurements_are_on_the_pages_for_them():
    """Speeds, memory and scores that were measured; other pages link to these."""
    measured = r"[\d.]+ (?:→|times as (?:fast|long))|\d tokens/s|\d (?:ms|MiB/h)\b|EM 0\.\d"
    found = {page.name for page in DOCS.glob("*.md") if re.search(measured, page.read_text(encoding="utf-8"))}
    assert found == {"benchmarks.md", "real-models.md"}


def test_the_readmes_own_task_is_a_config(tmp_path):
    """tests/system/test_environments.py runs the same one."""
    (settings,) = re.findall(r"```toml\n(.*?)```", (DOCS.parent / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "mine.toml").write_text(settings, encoding="utf-8")
    config = load_config([Path("atlas"), tmp_path / "mine.toml"], [])
    assert [environment.share for environment in config.environment.values()] == [1, 1]
    assert config.environment["calculator"].kind.__name__ == "Calculator"


def anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def headings(path: Path) -> set[str]:
    text = re.sub(r"(?ms)^```.*?^```", "", path.read_text(encoding="utf-8"))
    return {anchor(line.lstrip("#")) for line in text.splitlines() if line.startswith("#")}


def test_every_link_within_the_project_leads_somewhere():
    pages = [DOCS.parent / "README.md", DOCS.parent / "CHANGELOG.md", *DOCS.rglob("*.md")]
    dead, links = [], 0
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, place = target.partition("#")
            to = (page.parent / name).resolve() if name else page
            links += 1
            if not to.exists() or (place and place not in headings(to)):
                dead.append(f"{page.name}: {target}")
    assert dead == []
    assert links > 100


def test_the_page_on_troubleshooting_knows_the_folder_of_a_run():
    section = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").split("| in the folder |")[1].split("\n\n")[0]
    named = re.findall(r"`([^`]+?)/?`", "\n".join(line.split("|")[1] for line in section.splitlines()[2:]))
    written = {*run_folder.CHILDREN, run_folder.MARKER}
    assert [name for name in written if not any(fnmatch(name, pattern) for pattern in named)] == []
    assert [pattern for pattern in named if not any(fnmatch(name, pattern) for name in written)] == []


def test_the_last_lines_that_the_page_quotes_are_those_of_the_code():
    quoted = re.findall(r"^\| “(.+?)”", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    code = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    assert [text for text in quoted if not any(text in source for source in code)] == []
    assert len(quoted) > 10


def test_every_setting_that_a_page_names_exists():
    of_python = {"episode.memory", "episode.seed", "episode.question.metadata"}  # for environments and rewards
    keys = {*known_keys(), *run_folder.CHILDREN, run_folder.MARKER, *of_python}
    sections = {key.partition(".")[0] for key in known_keys() if "." in key}
    pages = [DOCS.parent / "README.md", *(path for path in DOCS.glob("*.md"))]
    unknown, seen = [], 0
    for page in pages:
        for key in re.findall(r"`(?:--)?([a-z_]+(?:\.[a-z_]+)+)[` =]", page.read_text(encoding="utf-8")):
            if key.partition(".")[0] in sections:
                seen += 1
                if key not in keys:
                    unknown.append(f"{page.name}: {key}")
    assert unknown == []
    assert seen > 200


def test_every_setting_has_a_meaning():
    said = reference(None)
    for key in known_keys():
        assert f"- `{key}` (" in said or f"### {key}" in said, key
    assert not re.findall(r"^- .*\): *$", said, re.MULTILINE)
