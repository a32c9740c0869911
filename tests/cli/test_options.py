"""Settings that nothing reads, and options of vLLM that are misspelled, are seen before an engine is loaded."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from cusearch_async.cli.preflight import options
from cusearch_async.config import load_config
from tests.cli.test_check import BASE

BATCHED = ("--rollout.vllm.max_num_batched_tokens",)


def test_settings_of_another_environment_are_named(atlas_config):
    assert not [*options.unused(load_config(atlas_config))]
    config = load_config(
        atlas_config, ["--environment.search.searches", "false", "--environment.search.parser", "nope"]
    )
    (found,) = options.unused(config)
    assert (found.status, found.what) == ("warning", "environment.search")
    assert found.text == "parser, searches are no settings of search, and not used"


def test_an_option_that_vllm_does_not_have_is_an_error():
    config = load_config(BASE, ["--rollout.vllm.gpu_mem", "0.5"])
    (found,) = options.vllm_options(config)
    assert (found.status, found.what) == ("error", "rollout.vllm")
    assert found.text.startswith("rollout.vllm.gpu_mem: vLLM 0.32.0 has no such option")


def test_those_that_it_has_and_those_that_nobody_knows_are_none(monkeypatch):
    assert not [*options.vllm_options(load_config(BASE, ["--rollout.vllm.max_logprobs", "3"]))]
    monkeypatch.setattr(options, "find_spec", lambda _: None)
    assert not [*options.vllm_options(load_config(BASE, ["--rollout.vllm.gpu_mem", "0.5"]))]


@pytest.mark.parametrize(
    ("overrides", "on_cpu", "least"),
    [
        ([*BATCHED, "1015"], True, 1016),
        ([*BATCHED, "1016"], True, None),
        ([*BATCHED, "1015"], False, None),
        ([*BATCHED, "1015", "--rollout.vllm.enable_chunked_prefill", "false"], False, 1016),
        ([*BATCHED, "200", "--rollout.max_num_seqs", "201"], False, 201),
        ([], True, None),
    ],
)
def test_batches_for_which_vllm_would_not_start_are_an_error(atlas_config, overrides, on_cpu, least):
    """All else had started, and workers ended for a setting of vLLM's that is none here."""
    config = load_config(atlas_config, overrides)
    assert config.episode.max_tokens == 1016
    found = [*options.batched_tokens(config, on_cpu)]
    assert [finding.status for finding in found] == ["error"] * (least is not None)
    assert all(f"must be at least {least}: " in finding.text for finding in found)


@pytest.mark.system
def test_its_source_says_what_is_imported():
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert options.engine_options() == {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert "torch" in sys.modules


def test_an_outage_that_episodes_do_not_outlast_is_warned_of(atlas_config):
    """Every episode failed before its worker gave up on the retriever, and each group lacked trajectories."""
    assert not [*options.patience(load_config(atlas_config))]
    (found,) = options.patience(load_config(atlas_config, ["--retriever.outage_s", "600"]))
    assert (found.status, found.what) == ("warning", "retriever.outage_s")
    assert found.text.startswith("600 s, and episode.timeout_s 600: episodes fail in an outage")


def test_a_rate_at_which_deep_episodes_cannot_finish_is_warned_of(atlas_config):
    """Those with many searches failed, and pools had the shallow ones."""
    web = ["--retriever.backend", "serper", "--rollout.workers", "4", "--episode.s_max", "10"]
    (found,) = options.patience(load_config(atlas_config, [*web, "--rollout.max_episodes", "192"]))
    assert (found.status, found.what) == ("warning", "episode.timeout_s")
    assert found.text.startswith("600 s, and 10 searches of 768 episodes wait 1536 s for their turns")
    assert not [*options.patience(load_config(atlas_config, [*web, "--rollout.max_episodes", "70"]))]
