"""A version that cannot be read is tried again, ever more rarely, and forgotten once one was loaded."""

from __future__ import annotations

from cusearch_async.errors import WeightsUnavailable
from cusearch_async.rollout import weight_loader


class Engine:
    loaded = "v0"

    def __init__(self, *damaged: str) -> None:
        self.damaged = set(damaged)

    async def load(self, _source, name, _check) -> None:
        if name in self.damaged:
            raise WeightsUnavailable(f"{name} is damaged")


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
