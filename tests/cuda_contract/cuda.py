"""Our code against the CUDA builds of vLLM, without a GPU: `make test-cuda-contract`. Downloads their wheels once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cusearch_async.config import shipped_configs
from tests.conftest import SLOW
from tests.cuda_contract.fake_cuda import as_used
from tests.cuda_contract.names import CONTRACT, OPTIONS, missing
from tests.cuda_contract.wheels import sources

VERSIONS = ("0.32.0", "0.33.0")
"""The pinned version, and the next one."""
PINNED_SHARE = 0.92
"""vLLM's default of gpu_memory_utilization."""


@pytest.fixture(scope="module", params=VERSIONS)
def vllm(request: pytest.FixtureRequest) -> Path:
    """Folder with the package of one version."""
    return sources(request.param)


@pytest.fixture(scope="module")
def started(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Shipped config -> what vLLM makes of it."""
    folder, configs = tmp_path_factory.mktemp("models"), list(shipped_configs())
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda_contract.fake_cuda", str(vllm), str(folder), *configs],
        env=os.environ | {"VLLM_CACHE_ROOT": str(folder / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600 * SLOW,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"config"')]
    return {each["config"]: each for each in found}


def test_the_pinned_version_is_the_first():
    pins = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"vllm=={VERSIONS[0]}"' in pins


@pytest.mark.parametrize("contract", [CONTRACT, OPTIONS], ids=["called", "options"])
def test_the_cuda_build_has_what_we_ask_of_it(vllm, contract):
    assert missing(vllm / "vllm", contract) == []


@pytest.mark.parametrize("name", shipped_configs())
def test_an_engine_starts_on_a_gpu_as_it_is_meant_to(started, name):
    config = as_used(name)
    found = started[name]
    assert found["start_method"] == "spawn", "a forked engine outlives its worker"
    assert found["device"] == "cuda"
    assert found["dtype"] == config.model.dtype
    assert found["attention"] == {"bfloat16": "FLASH_ATTN", "float32": "TRITON_ATTN"}[config.model.dtype]
    assert found["memory_share"] == (config.rollout.vllm.gpu_memory_utilization or PINNED_SHARE)
    assert found["kv_cache"] == config.rollout.vllm.kv_cache_memory_bytes
    if config.model.dtype == "bfloat16":
        assert found["batched_tokens"] == 8192, "vLLM's own 2048 would make each update four times as many steps"
    assert found["tensor_parallel"] == config.rollout.vllm.tensor_parallel_size
    assert found["max_num_seqs"] == config.rollout.max_num_seqs
    assert found["max_model_len"] == config.episode.max_tokens
    assert found["logprobs"] == "processed_logprobs"
    assert found["extension"] == ("" if config.learner.lora.rank else "cusearch_async.rollout.staging.StagesWeights")
    modes = ("v2_model_runner", "chunked_prefill", "async_scheduling", "prefix_caching")
    assert [found[mode] for mode in modes] == [True] * len(modes)


def test_a_kv_cache_of_a_fixed_size_is_not_measured(vllm):
    """Where learner and engine share a GPU, what is measured is what the learner takes too."""
    source = (vllm / "vllm" / "v1" / "worker" / "gpu_worker.py").read_text(encoding="utf-8")
    body = source.partition("def determine_available_memory")[2].partition("\n    def ")[0]
    fixed, _, rest = body.partition("if kv_cache_memory_bytes := self.cache_config.kv_cache_memory_bytes:")
    assert "memory_profiling(" not in fixed
    assert "return" in rest.partition("memory_profiling(")[0]
