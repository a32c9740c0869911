"""What an episode does when its retriever fails."""

from __future__ import annotations

import pytest

from cusearch_async.errors import RetrievalUnavailable
from tests.http_service import Service, hangs, hangs_up, says
from tests.retrieval.retrievers import SEARCH_R1, client_of, closes_early
from tests.rollout.retrievers import TOKENIZER, roll_out

FAILURES = [says("down", 500), hangs, closes_early, hangs_up, says("<html>"), says('{"result": [{}]}')]


async def test_an_episode_on_search_r1s_exact_answer_counts_the_search():
    async with client_of(Service(says(SEARCH_R1))) as client:
        trajectory = await roll_out(client)
    assert (trajectory.depth, trajectory.em) == (1, 1.0)
    assert "The capital of Peru is Lima." in TOKENIZER.decode(trajectory.token_ids[~trajectory.sampled].tolist())


@pytest.mark.parametrize("failure", FAILURES)
async def test_an_episode_waits_for_a_failure_to_pass_and_then_continues(failure):
    async with client_of(Service(failure, says(SEARCH_R1)), timeout_s=0.3, outage_s=60) as client:
        trajectory = await roll_out(client)
        assert client.failures.total() == 1
    assert (trajectory.depth, trajectory.em) == (1, 1.0)


@pytest.mark.parametrize("failure", FAILURES)
async def test_an_episode_whose_retriever_stays_broken_makes_no_trajectory(failure):
    async with client_of(Service(failure), timeout_s=0.1) as client:
        with pytest.raises(RetrievalUnavailable, match="has given no valid answer"):
            await roll_out(client)
