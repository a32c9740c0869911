"""The examples for clusters name what there is. No cluster runs them here."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from cusearch_async.cli import check
from cusearch_async.cli.preflight.device import Device
from cusearch_async.cli.preflight.shapes import shape_of
from cusearch_async.config import load_config
from cusearch_async.processes.start import PROCESSES

CLUSTER = Path(__file__).parents[2] / "docs" / "examples" / "cluster"
FILES = ("slurm.sh", "kubernetes.yaml")


def test_the_config_passes_check():
    config = load_config(CLUSTER / "cluster.toml")
    found = list(check.check(config, shape_of(config.model), Device(80.0, "as the test says")))
    assert "learner memory" in {finding.what for finding in found}
    assert [finding for finding in found if finding.status == "error"] == []


@pytest.mark.parametrize("name", FILES)
def test_what_is_started_exists_and_all_of_it_is_started(name):
    text = (CLUSTER / name).read_text(encoding="utf-8")
    for module in re.findall(r"cusearch_async[\w.]+", text):
        assert importlib.util.find_spec(module), module
    started = set(re.findall(r"(?:START|processes\.start)[\",\s-]+(\w+)", text)) & {*PROCESSES}
    assert started == {"learner", "rollout", "retriever"}
    settings = re.findall(r"--(\w+\.\w+) (\S+)", text)
    load_config(CLUSTER / "cluster.toml", [part for key, value in settings for part in (f"--{key}", value)])


@pytest.mark.parametrize("name", FILES)
def test_torchrun_knows_the_options_and_starts_as_many_ranks_as_the_config_says(name):
    from torch.distributed.run import get_args_parser

    text = (CLUSTER / name).read_text(encoding="utf-8").replace("\n            - ", " ").replace("\\\n", " ")
    options = re.search(r"torchrun\]?\s+(?:args:)?\s*(--.*? -m )", text)
    assert options
    parsed = get_args_parser().parse_args([*options[1].split()[:-1], "script"])
    learner = load_config(CLUSTER / "cluster.toml").learner
    assert (int(parsed.nnodes), int(parsed.nproc_per_node)) == (learner.nodes, learner.ranks_per_node)


def test_the_script_is_valid_bash():
    subprocess.run(["bash", "-n", str(CLUSTER / "slurm.sh")], check=True)


def test_the_manifest_is_valid_yaml():
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text(encoding="utf-8")))
    assert [document["kind"] for document in documents] == [
        "Service", "StatefulSet", "Service", "Job", "Deployment"
    ]  # fmt: skip
