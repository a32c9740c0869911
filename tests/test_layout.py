"""Imports point one way: the layers of docs/architecture.md."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import cusearch_async

ROOT = Path(cusearch_async.__file__).parent
LAYERS = [
    {
        "types",
        "errors",
        "files",
        "objects",
        "streams",
        "overrides",
        "surrogates",
        "folding",
        "machine",
        "paths",
        "version",
        "concurrency",
        "extensions",
    },
    {"algorithm", "alarms"},
    {"environments"},
    {"config"},
    {"models", "gguf", "lifecycle", "http_server", "run"},
    {"transport", "weights"},
    {"metrics"},
    {"retrieval"},
    {"rollout"},
    {"agents"},
    {"learner"},
    {"training"},
    {"replay", "simulation"},
    {"evaluation"},
    {"atlas"},
    {"data"},
    {"warmstart"},
    {"processes"},
    {"study"},
    {"dashboard"},
    {"cli"},
]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(path)))


def imported_parts(path: Path) -> set[str]:
    """Second components of the cusearch_async imports of a module, wherever in it they stand."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cusearch_async"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found


def test_no_module_imports_a_later_layer():
    level = {part: number for number, layer in enumerate(LAYERS) for part in layer}
    for path in ROOT.rglob("*.py"):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for part in imported_parts(path):
            assert level[part] <= level[own], f"{path.relative_to(ROOT)} imports {part}"


def test_there_is_no_import_circle():
    """Also of imports within functions."""
    parts = {path: path.relative_to(ROOT.parent).with_suffix("").parts for path in ROOT.rglob("*.py")}
    names = {".".join(part).removesuffix(".__init__"): path for path, part in parts.items()}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= (imported & names.keys()) or ({node.module} & names.keys())
    TopologicalSorter(graph).prepare()


def test_rollouts_and_training_know_nothing_of_each_other():
    of_the_learner = {"learner", "training"}
    for own, others in (("rollout", of_the_learner), ("learner", {"rollout", "training"}), ("training", {"rollout"})):
        for path in (ROOT / own).rglob("*.py"):
            assert not others & imported_parts(path), path.relative_to(ROOT)


def test_the_training_loop_imports_no_torch():
    """It is asyncio; the tensors are the learner's."""
    for path in {*(ROOT / "training").rglob("*.py"), *(ROOT / "replay").rglob("*.py")}:
        for node in parsed(path).body:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {"torch", "deepspeed", "transformers"} & {name.split(".")[0] for name in names}, path.name


def test_no_file_is_longer_than_a_reader_can_hold():
    for path in sorted([*ROOT.rglob("*.py"), *Path(__file__).parent.rglob("*.py")]):
        length = len(path.read_text(encoding="utf-8").splitlines())
        assert length <= 450, f"{path.name} has {length} lines"


def test_vllm_and_deepspeed_are_known_to_few_modules():
    users: dict[str, set[str]] = {"vllm": set(), "deepspeed": set()}
    for path in ROOT.rglob("*.py"):
        for node in nodes_of(path):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.split(".")[0] in users:
                    users[name.split(".")[0]].add(str(path.relative_to(ROOT)))
    worker = {f"rollout/{name}.py" for name in ("engine", "turn_scheduler", "staging")}
    assert users == {"vllm": {*worker, "agents/parsing.py"}, "deepspeed": {"learner/deepspeed_engine.py"}}


def test_few_modules_open_sockets_that_others_can_connect_to():
    """Each binds to loopback, or to the address that it is given; system/test_listeners.py watches a whole run."""
    opening = {"bind", "TCPSite", "SockSite", "start_server", "create_server", "run_app", "HTTPServer", "TCPServer"}
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in nodes_of(path):
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if name in opening:
                found.add(str(path.relative_to(ROOT)))
    assert found == {
        "agents/gateway.py",
        "http_server.py",
        "lifecycle/children.py",
        "learner/ranks.py",
        "weights/http.py",
    }


def test_no_message_names_a_page_that_is_not_installed():
    """A wheel has no docs folder; docstrings are for those who read the source."""
    for path in ROOT.rglob("*.py"):
        comments = {id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr)}
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in comments:
                assert "docs/" not in node.value, f"{path.relative_to(ROOT)}:{node.lineno}"


def test_no_module_of_tests_loads_vllm_or_deepspeed_for_all_the_others():
    """Seconds of each process that collects tests."""
    heavy = {"rollout.engine", "learner.deepspeed_engine", "learner.learner"}
    heavy |= {"processes.learner", "processes.rollout", "processes.evaluator"}
    names = {f"cusearch_async.{name}" for name in heavy} | {"vllm", "deepspeed"}
    for path in Path(__file__).parent.rglob("test_*.py"):
        for node in parsed(path).body:
            loaded = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                loaded = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            assert not names & set(loaded), path.name


def test_deadlines_of_tests_grow_with_the_machines_slowness():
    """What waits for a process or a task is given SLOW times as long, see conftest."""
    place = {"wait_for": 1, "timeout": 0}  # of the seconds among the positional arguments
    for path in Path(__file__).parent.rglob("test_*.py"):
        for node in nodes_of(path):
            name = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
            if name in {"wait", "run", "communicate", "create_connection", "wait_for", "timeout"}:
                given = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
                given += node.args[place[name] : place[name] + 1] if name in place else []
                assert not any(isinstance(value, ast.Constant) for value in given), f"{path.name}:{node.lineno}"
