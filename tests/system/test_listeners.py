"""A whole run, and nothing of it can be reached from another machine."""

from __future__ import annotations

import socket

import pytest

from tests.conftest import SLOW, free_port, wait_until
from tests.sockets import ANYWHERE, family, listening
from tests.system.conftest import Run, finish

pytestmark = pytest.mark.system


@pytest.mark.long
def test_no_process_of_a_run_listens_beyond_this_machine(run: Run):
    """Redis, retriever, simulator, vLLM, and a learner of two ranks (ZeRO-3) with their rendezvous. The run is held
    while the listeners are looked at, and then goes on to its end."""
    run.forks = False
    run.overrides["retriever.backend"] = "zerosearch"
    run.overrides["retriever.zerosearch.url"] = f"http://127.0.0.1:{free_port()}/v1"
    learner = {"learner__ranks": 2, "learner__zero_stage": 3, "loss__kl_coef": 0}
    launched = run.cusearch("launch", run__steps=2, pool__max_staleness=0, **learner)
    wait_until(lambda: len(run.metrics()) >= 1 or launched.poll() is not None, 300)
    assert launched.poll() is None, finish(launched)
    run.redis().hset("cusearch:{atlas}:state", "paused", 1)
    places = listening(*family(launched.pid))
    served = {int(str(run.overrides[key]).split(":")[2].split("/")[0]) for key in run.overrides if key.endswith("url")}
    assert len(served) == 3
    assert served < {place.port for place in places}, "and more: the ranks' rendezvous"
    assert all(place.address.is_loopback for place in places), places
    for address in ANYWHERE:
        for place in places:
            with pytest.raises(OSError, match=r"refused|unreachable|Cannot assign|Invalid argument"):
                socket.create_connection((address, place.port), timeout=2 * SLOW)
    run.redis().hset("cusearch:{atlas}:state", "paused", 0)
    status, output = finish(launched)
    assert status == 0, output
    for row in run.metrics():  # the second on the weights that came back
        assert row["off_policy/logprob_difference_max"] < 1e-3
        assert row["off_policy/weight_mean"] == pytest.approx(1, abs=1e-3)
        assert (row["staleness/max"], sum(row["depth/generated"]), sum(row["depth/selected"])) == (0, 16, 8)
        assert row["train/grad_norm"] > 0
    assert "loaded weights v000001-e1" in run.log("rollout-0")
