"""The image copies what there is, and its containers start the whole of a run. No container runs here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cusearch_async.cli.main import make_parser
from cusearch_async.cli.parts import fleet
from cusearch_async.config import load_config
from cusearch_async.lifecycle import gpus
from cusearch_async.processes.start import PROCESSES

ROOT = Path(__file__).parents[2]
CONTAINERS = ROOT / "docs" / "examples" / "containers"


def services(name: str) -> dict[str, dict[str, object]]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, dict[str, object]] = yaml.safe_load((CONTAINERS / name).read_text(encoding="utf-8"))["services"]
    return found


def test_the_image_is_made_of_what_there_is():
    lines = (CONTAINERS / "Dockerfile").read_text(encoding="utf-8")
    copied = {source for words in re.findall(r"^COPY (.+)$", lines, re.MULTILINE) for source in words.split()[:-1]}
    assert {*copied} == {path for path in copied if (ROOT / path).exists()}
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    setups = {*re.findall(r"SETUP=([\w-]+)", lines)}
    assert setups == {"setup", "setup-gpu"} == setups & {*re.findall(r"^([\w-]+):", make, re.MULTILINE)}
    recipes = re.findall(r"-r (requirements/[\w.]+)", make)
    assert len(recipes) >= 3
    assert all((ROOT / path).exists() for path in recipes), "the folder `requirements` is copied whole"


def test_the_image_has_a_python_that_make_looks_for():
    line = re.search(r"^PYTHON \?= .*$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert line
    known = re.findall(r"python3\.\d+", line[0])
    assert known == ["python3.11", "python3.12", "python3.13"]
    installed = {*(CONTAINERS / "Dockerfile").read_text(encoding="utf-8").split()}
    assert [name for name in known if {f"{name}-dev", f"{name}-venv"} <= installed] == ["python3.11"]


@pytest.mark.parametrize("config", ["atlas", "laptop"])
def test_each_container_starts_a_process_that_there_is(config):
    commands = {
        name: [re.sub(r"\$\{CONFIG:-atlas\}", config, word) for word in service["command"]]
        for name, service in services("compose.yaml").items()
        if name != "network"
    }
    for name, (program, *words) in commands.items():
        assert program == "cusearch"
        arguments = vars(make_parser([words[0]]).parse_args(words))
        assert (arguments.get("config") or arguments["runs"]) == [Path(config)], name
    started = {words[2] if words[1] == "worker" else words[1] for words in commands.values()}
    assert started == {"redis", *PROCESSES, "dashboard"} - {"relay"}


def test_containers_share_what_processes_of_a_machine_share():
    """The loopback, on which all listen; the folder of the run; and the locks by which they divide GPUs."""
    _, *processes = (found := services("compose.yaml")).values()
    assert found["network"]["ports"] == ["127.0.0.1:8787:8787"]
    for process in processes:
        assert process["network_mode"] == "service:network"
        assert process["volumes"] == [".:/work", f"gpus:/tmp/{gpus._folder().parent.name.rpartition('-')[0]}-0"]
    assert {*services("compose.gpu.yaml")} == {"learner", "rollout", "evaluator"}


def test_each_container_gets_the_secrets_that_its_process_needs():
    """A retriever ended for the lack of a key that was in the shell, and was started again for ever."""
    found = services("compose.yaml")
    known_as = {name: name for name in ("retriever", "learner", "rollout", "evaluator")} | {"page": "dashboard"}
    for name, process in known_as.items():
        needed = {secret for secret, users in fleet._SECRETS.items() if process in users}
        assert {*found[name]["environment"]} - {"HF_TOKEN"} == needed, name
    assert found["redis"]["environment"] == ["CUSEARCH_REDIS_PASSWORD"]
    assert "HF_TOKEN" in found["rollout"]["environment"]


def test_a_worker_in_the_lean_image_reads_the_questions_of_the_cluster():
    """It ended at once: its questions are in a .parquet file."""
    (packages,) = re.findall(r'LEAVE_OUT="([^"]+)"', (CONTAINERS / "Dockerfile").read_text(encoding="utf-8"))
    source = load_config(CONTAINERS.parent / "cluster" / "cluster.toml").data.source
    assert ".parquet" in str(source)
    assert "pyarrow" not in packages.split()


@pytest.mark.parametrize(
    ("name", "run"), [("containers/compose.yaml", "atlas"), ("cluster/kubernetes.yaml", "cluster")]
)
def test_the_pages_address_is_one_that_can_be_opened(name, run):
    """The one in a pod's log has the pod's name."""
    text = (CONTAINERS.parent / name).read_text(encoding="utf-8")
    assert f"# http://127.0.0.1:8787/{run}/?token=" in text or f": http://127.0.0.1:8787/{run}/?token=" in text
