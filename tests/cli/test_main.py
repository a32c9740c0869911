"""The `cusearch` command: every command and argument has a help text, and none waits for what it does not use."""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cusearch_async
from cusearch_async.cli import main
from cusearch_async.processes import start

LOADED = """
import sys
from cusearch_async.cli import main
sys.argv = ["cusearch", *sys.argv[1:]]
try:
    main.main()
except SystemExit as ended:
    assert not ended.code
print()
print(*sys.modules)
"""


def parsers(parser: argparse.ArgumentParser):
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


def test_everything_that_can_be_typed_has_a_help_text():
    missing = [
        f"{parser.prog} {action.dest}"
        for parser in parsers(main.make_parser())
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert not missing


def test_a_bare_command_shows_the_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cusearch"])
    main.main()
    assert "train a small search agent" in capsys.readouterr().out


def test_elsewhere_than_on_linux_every_command_says_so(monkeypatch):
    """On a Mac `check`, which should say what is wrong, ended with a traceback."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "argv", ["cusearch", "check"])
    with pytest.raises(SystemExit, match=r"this is for Linux alone; elsewhere use a container, .* or WSL 2"):
        main.main()


def test_the_version_is_said(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cusearch", "--version"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0
    number, _, commit = capsys.readouterr().out.strip().partition("+")
    assert number == f"cusearch {cusearch_async.__version__}"
    is_known = (Path(cusearch_async.__file__).parents[1] / ".git").exists() and shutil.which("git") is not None
    assert bool(re.fullmatch(r"g[0-9a-f]{12}(\.changed)?", commit)) == is_known


def loaded_by(*command: str) -> set[str]:
    """The modules that `cusearch COMMAND` has imported when it ends."""
    done = subprocess.run([sys.executable, "-c", LOADED, *command], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("command", [["--help"], [], ["--version"]])
def test_the_list_of_commands_loads_no_command_and_no_library(command):
    loaded = loaded_by(*command)
    libraries = {"torch", "transformers", "matplotlib", "redis", "aiohttp", "numpy", "pydantic", "rich", "asyncio"}
    assert not libraries & loaded
    ours = {name for name in loaded if name.startswith("cusearch_async.cli.")}
    assert ours == {"cusearch_async.cli.main"}


def test_no_command_imports_another_command():
    """What two of them need is a separate module."""
    folder = Path(main.__file__).parent
    for path in folder.rglob("*.py"):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
        names |= {str(node.module) for node in nodes}
        assert not names & {f"cusearch_async.cli.{name}" for name in main.COMMANDS}, path.name


def test_every_command_has_the_file_of_its_name_and_no_other_file_is_there():
    assert {path.stem for path in Path(main.__file__).parent.glob("*.py")} == {*main.COMMANDS, "main", "__init__"}


def test_a_single_process_is_started_in_no_third_way():
    """By `cusearch worker NAME` or `python -m workers.NAME`: messages, docs and examples know no other."""
    root = Path(cusearch_async.__file__).parents[1]
    places = (root / "cusearch_async", root / "docs", root / "workers")
    texts = [path for place in places for path in place.rglob("*.*") if path.suffix in (".py", ".md", ".sh", ".yaml")]
    assert [path for path in (*texts, root / "README.md") if "cusearch_async.processes" in without_imports(path)] == []


def without_imports(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.strip().startswith(("from ", "import ")))


def test_a_command_alone_is_loaded():
    loaded = loaded_by("buffer", "--help")
    assert "cusearch_async.cli.buffer" in loaded
    assert not {"cusearch_async.cli.demo", "matplotlib", "aiohttp"} & loaded


@pytest.mark.system
def test_no_command_waits_for_heavy_libraries():
    """`configure_process` has to come before torch is loaded."""
    code = "import sys; from cusearch_async.cli import main; main.make_parser()"
    code += "; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cusearch_async.cli.demo" in done.stdout.split()
    assert not {"torch", "transformers", "vllm", "numba", "matplotlib"} & set(done.stdout.split())
    assert start.PROCESSES.keys() == {"retriever", "relay", "learner", "rollout", "evaluator"}
