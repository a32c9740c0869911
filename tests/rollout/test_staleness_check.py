"""An engine that keeps old weights is found by the checksums of its tensors."""

from __future__ import annotations

import pytest

from cusearch_async.rollout.staleness_check import Loaded, digests_of, stale_tensors
from cusearch_async.weights.tensor_file import TensorRecord

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def published(**checksums: str) -> dict[str, TensorRecord]:
    return {name.replace("__", "."): TensorRecord([2], "BF16", checksum) for name, checksum in checksums.items()}


def loaded(tensors, *ranks) -> Loaded:
    return Loaded(
        tensors, digests_of([{f"dp0:pp0:pcp0:tp{i}:{k}": v for k, v in r.items()} for i, r in enumerate(ranks)])
    )


Q, K, GATE, NORM = "0__q_proj__weight", "0__k_proj__weight", "0__gate_proj__weight", "norm__weight"
BEFORE = loaded(
    published(**{Q: "1", K: "1", GATE: "1", NORM: "1"}),
    {"0.qkv_proj.weight": "a", "0.gate_up_proj.weight": "b", "norm.weight": "c", "packed.weight": EMPTY},
)


def after(tensors, **digests):
    told = {"0.qkv_proj.weight": "a", "0.gate_up_proj.weight": "b", "norm.weight": "c", "packed.weight": EMPTY}
    return loaded(tensors, told | {name.replace("__", "."): digest for name, digest in digests.items()})


def test_what_has_changed_in_both_or_in_neither_is_fresh():
    tensors = published(**{Q: "1", K: "2", GATE: "1", NORM: "1"})
    assert stale_tensors(BEFORE, after(tensors, **{"0__qkv_proj__weight": "A"})) == []


@pytest.mark.parametrize(
    ("name", "stale"), [(K, "0.qkv_proj.weight"), (GATE, "0.gate_up_proj.weight"), (NORM, "norm.weight")]
)
def test_a_tensor_that_should_have_changed_is_named_also_where_it_is_fused(name, stale):
    tensors = published(**{Q: "1", K: "1", GATE: "1", NORM: "1"} | {name: "2"})
    assert stale_tensors(BEFORE, after(tensors)) == [stale]


def test_a_tensor_without_a_checksum_is_not_judged():
    assert "packed.weight" not in BEFORE.digests


def test_a_part_of_one_rank_may_stay_where_that_of_another_changes():
    """A few changed elements may all lie in one rank's part."""
    old, new = published(w="1"), published(w="2")
    before = loaded(old, {"w": "a"}, {"w": "b"})
    assert stale_tensors(before, loaded(new, {"w": "a"}, {"w": "B"})) == []
    assert stale_tensors(before, loaded(new, {"w": "a"}, {"w": "b"})) == ["w"]
