"""Every token of a turn has the version of the weights that sampled it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from cusearch_async.rollout.turn import turn_of


def completion(*spans, finish_reason="stop"):
    """Five tokens, as vLLM returns them."""
    spans = [SimpleNamespace(start=start, end=end, version=version) for start, end, version in spans]
    logprobs = SimpleNamespace(logprobs=[-0.5, -1.0, -1.5, -2.0, -2.5])
    named = {"logprobs": logprobs, "weight_versions": spans or None, "finish_reason": finish_reason}
    return SimpleNamespace(token_ids=(7, 8, 9, 10, 11), **named)


def test_tokens_sampled_before_new_weights_keep_the_older_version():
    turn = turn_of(completion((0, 2, "3"), (2, 5, "4")), version=4)
    assert turn.versions.tolist() == [3, 3, 4, 4, 4]
    assert turn.versions.dtype == np.int32
    assert turn.token_ids == [7, 8, 9, 10, 11]
    assert turn.logprobs.tolist() == [-0.5, -1.0, -1.5, -2.0, -2.5]


def test_tokens_of_no_span_are_of_the_loaded_version():
    assert turn_of(completion(), version=6).versions.tolist() == [6] * 5
    assert turn_of(completion((1, 3, "5")), version=6).versions.tolist() == [6, 5, 5, 6, 6]


def test_tokens_from_before_any_published_weights_have_version_minus_one():
    assert turn_of(completion((0, 1, "initial"), (1, 5, "-1")), version=0).versions.tolist() == [-1] * 5


def test_a_turn_that_reached_its_most_tokens_is_cut_unless_a_stop_ends_it_earlier():
    turn = turn_of(completion(finish_reason="length"), version=0)
    assert turn.is_cut
    assert turn.up_to(5).is_cut
    assert not turn.up_to(4).is_cut
    assert not turn_of(completion(), version=0).is_cut
