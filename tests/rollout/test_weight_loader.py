"""A version that cannot be read is tried again, ever more rarely, and forgotten once one was loaded."""

from __future__ import annotations

import pytest

from cusearch_async.errors import LearnerUnreachable, WeightsUnavailable
from cusearch_async.rollout import weight_loader


class Engine:
    def __init__(self, *damaged: str, error=WeightsUnavailable, loaded="v0") -> None:
        self.damaged, self.error, self.loaded = set(damaged), error, loaded

    async def load(self, _source, name, _check) -> None:
        if name in self.damaged:
            raise self.error(f"{name} is damaged")


async def test_failures_are_counted_for_each_version_and_forgotten_after_a_success(monkeypatch):
    counts = []
    monkeypatch.setattr(weight_loader, "doubling_pause_s", lambda failures, *_: counts.append(failures) or 0.0)
    engine = Engine("a", "b")
    loader = weight_loader.PatientLoader(engine, None, 1e9)
    for name, is_loaded in (("a", False), ("a", False), ("b", False), ("c", True)):
        assert await loader.load(name, check=False, idle=False) is is_loaded
        assert loader.is_failing is not is_loaded
    assert counts == [1, 2, 1]
    assert not await loader.load("b", check=False, idle=False)
    assert counts[-1] == 1


@pytest.mark.parametrize(
    ("error", "loaded", "is_finished", "waits"),
    [
        (LearnerUnreachable, "v0", False, True),
        (LearnerUnreachable, "v0", True, False),
        (LearnerUnreachable, "", False, False),
        (WeightsUnavailable, "v0", False, False),
    ],
)
async def test_a_worker_with_weights_waits_for_a_learner_that_died_after_it_announced_others(
    monkeypatch, error, loaded, is_finished, waits
):
    """All workers ended together after redis.outage_s, where those that were told of nothing waited for ever."""
    monkeypatch.setattr(weight_loader, "doubling_pause_s", lambda *_: 0.0)
    loader = weight_loader.PatientLoader(Engine("a", error=error, loaded=loaded), None, patience_s=0.0)
    assert not await loader.load("a", check=False, idle=True, is_finished=is_finished)
    if waits:
        assert not await loader.load("a", check=False, idle=True, is_finished=is_finished)
    else:
        with pytest.raises(WeightsUnavailable, match="a is damaged; no other version was announced for 0 s"):
            await loader.load("a", check=False, idle=True, is_finished=is_finished)


async def test_the_version_after_one_that_was_given_up_has_the_whole_patience(monkeypatch):
    """An evaluator loads it then, and left it out when its first attempt failed."""
    now = [0.0]
    monkeypatch.setattr(weight_loader.time, "monotonic", lambda: now[0])
    loader = weight_loader.PatientLoader(Engine("a", "b"), None, patience_s=60.0)

    async def is_given_up(name: str, at: float) -> bool:
        now[0] = at
        try:
            return await loader.load(name, check=False, idle=True)
        except WeightsUnavailable:
            return True

    assert [await is_given_up("a", at) for at in (0.0, 50.0, 61.0)] == [False, False, True]
    assert [await is_given_up("b", at) for at in (100.0, 150.0, 161.0)] == [False, False, True]
