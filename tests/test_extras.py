"""What only an extra installs is imported only where it is used, and named in one line where it is missing."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cusearch_async.data.files import write_questions
from cusearch_async.types import Question
from tests.conftest import SLOW

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ("study", "retrieval", "eval", "gguf", "objects", "trackers")
MODULES = {"faiss-cpu": "faiss", "mlflow-skinny": "mlflow"}
"""Requirement -> module, where they are called differently."""

REFUSING = """
import importlib, pkgutil, runpy, sys
for name in {refused!r}:
    sys.modules[name] = None  # an import of it raises ModuleNotFoundError, and find_spec finds nothing
"""
OF_EXTRAS = """
import cusearch_async
for module in pkgutil.walk_packages(cusearch_async.__path__, "cusearch_async."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print(f"{module.name}: {error.name}")
    except cusearch_async.errors.MissingExtra as error:
        print(f"{module.name}: {error}")
"""


def modules_of(lines: list[str]) -> set[str]:
    names = [Requirement(line).name for line in lines]
    return {MODULES.get(name, name) for name in names}


OF = {extra: modules_of(PROJECT["optional-dependencies"][extra]) for extra in EXTRAS}
REFUSED = sorted(set.union(*OF.values()))


def without(names: list[str], code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Python code that is run where the modules are not installed."""
    command = [sys.executable, "-c", REFUSING.format(refused=names) + code]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100 * SLOW, check=False)


def run(module: str, *words: str) -> str:
    return f"sys.argv = {[module, *words]!r}\nrunpy.run_module({module!r}, run_name='__main__')"


def cusearch(*words: str) -> str:
    return run("cusearch_async.cli.main", *words)


def test_the_base_install_has_none_of_them():
    assert not modules_of(PROJECT["dependencies"]) & set(REFUSED)
    of_commands = {"pandas", "scipy", "matplotlib", "faiss", "bm25s", "numba", "pyarrow", "openai", "gguf"}
    assert {*REFUSED} == of_commands | {"mlflow", "obstore", "trackio", "wandb"}
    (everything,) = PROJECT["optional-dependencies"]["all"]
    assert Requirement(everything).extras == set(EXTRAS)


def test_every_import_of_them_names_an_extra_that_has_it():
    checked = 0
    for path in (ROOT / "cusearch_async").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        allowed: dict[ast.AST, set[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.With) and getattr(node.items[0].context_expr, "func", None):
                call = node.items[0].context_expr
                if getattr(call.func, "id", "") == "packages_of":
                    allowed |= dict.fromkeys(node.body, OF.get(call.args[0].value, set()))
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
                allowed |= {one: set(REFUSED) for one in node.body}
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            ours = {name.split(".")[0] for name in names} & set(REFUSED)
            assert ours <= allowed.get(node, set()), f"{path.relative_to(ROOT)}:{node.lineno}"
            checked += len(ours)
    assert checked > len(REFUSED)


@pytest.mark.parametrize(
    "code",
    [
        run("workers.rollout", "--help"),
        run("workers.learner", "--help"),
        cusearch("demo", "--help"),
        cusearch("launch", "--help"),
        cusearch("config", "atlas"),
        cusearch("data", "check", "{folder}/a.jsonl"),
    ],
)
@pytest.mark.system
def test_the_base_needs_none_of_them(code: str, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "Why?", "answer": "Because"}))
    done = without(REFUSED, code.replace("{folder}", str(tmp_path)))
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.system
def test_only_modules_of_an_extra_need_one():
    """What vLLM itself needs, and our modules that load it, is vLLM's."""
    done = without(REFUSED, OF_EXTRAS)
    assert done.returncode == 0, done.stderr
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line.startswith("cusearch_async."))
    of_vllm = {name for name, missing in found.items() if not missing.endswith("]'")}
    assert of_vllm == {f"cusearch_async.rollout.{name}" for name in VLLM}
    for start, missing in MISSING.items():
        ours = [name for name in found if name.startswith(f"cusearch_async.{start}")]
        assert ours, start
        assert {found.pop(name) for name in ours} == {missing}
    assert found.keys() == of_vllm


def of(package: str, extra: str) -> str:
    return f"{package} is not installed: pip install 'cusearch-async[{extra}]'"


VLLM = ("engine", "turn_scheduler", "staging")
MISSING = {
    "retrieval.bm25": of("bm25s", "retrieval"),
    "retrieval.dense": of("faiss", "retrieval"),
    "atlas": of("bm25s", "retrieval"),
    "evaluation.findings": of("scipy", "eval"),
    "evaluation.judge": of("openai", "eval"),
    "study": of("pandas", "study"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run, with a question file."""
    question = Question(id="mine/0", text="Why?", answers=("Because",), category="mine")
    write_questions([question], tmp_path / "a.parquet")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "epoch": 1}) + "\n")
    return tmp_path


@pytest.mark.system
@pytest.mark.parametrize(
    ("missing", "extra", "code"),
    [
        ("pandas", "study", cusearch("study", "study.toml")),
        pytest.param("scipy", "study", cusearch("study", "study.toml"), marks=pytest.mark.slow),
        pytest.param("pyarrow", "study", cusearch("study", "study.toml"), marks=pytest.mark.slow),
        ("matplotlib", "study", cusearch("runs", "plot", ".")),
        pytest.param("matplotlib", "study", cusearch("runs", "compare", ".", "."), marks=pytest.mark.slow),
        ("bm25s", "retrieval", run("workers.retriever", "atlas")),
        pytest.param("numba", "retrieval", run("workers.retriever", "atlas"), marks=pytest.mark.slow),
        ("faiss", "retrieval", run("workers.retriever", "atlas", "--retriever.backend", "dense")),
        ("gguf", "gguf", cusearch("data", "model", "a.gguf", "model")),
        pytest.param("pyarrow", "eval", cusearch("data", "check", "a.parquet"), marks=pytest.mark.slow),
        ("pyarrow", "eval", cusearch("data", "convert", "atlas", "--output", "b.parquet")),
        pytest.param(
            "pyarrow", "eval", run("workers.learner", "atlas", "--data.source", "a.parquet"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_missing_package_is_named_with_its_extra_in_one_line(missing: str, extra: str, code: str, folder: Path):
    done = without([missing], code, cwd=folder)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].partition(": ")[2] == of(missing, extra), done.stderr
    assert "Traceback" not in done.stderr
