"""What vLLM's worker says of weights that it reads, and what the engine makes of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from cusearch_async.errors import WeightsMismatch, WeightsUnavailable

pytestmark = pytest.mark.system  # vLLM and torch


@pytest.mark.parametrize(("is_there", "error"), [(False, WeightsUnavailable), (True, WeightsMismatch)])
async def test_a_rank_that_cannot_read_a_version_answers_as_the_others_do(tmp_path, is_there, error):
    """It raised: vLLM then left the other ranks' answers where it looked for those of its next call, and the next
    version failed with this one's error."""
    from cusearch_async.rollout.engine import Engine
    from cusearch_async.rollout.staging import StagesWeights

    ranks = [StagesWeights(), StagesWeights()]
    for rank in ranks:
        rank.device = SimpleNamespace(type="cuda")
        rank.model_runner = SimpleNamespace(get_model=lambda: None)
    answers = [asyncio.Queue() for _ in ranks]

    async def collective_rpc(name, kwargs=None):
        for rank, queue in zip(ranks, answers, strict=True):
            try:
                queue.put_nowait((getattr(rank, name)(**(kwargs or {})), None))
            except Exception as failure:
                queue.put_nowait((None, failure))
        found = []
        for queue in answers:  # as MultiprocExecutor: the first failure leaves the others' answers
            answer, failure = await queue.get()
            if failure is not None:
                raise failure
            found.append(answer)
        return found

    version = SimpleNamespace(directory=tmp_path, manifest=SimpleNamespace(file="model.safetensors"))
    if is_there:
        (tmp_path / "model.safetensors").write_bytes(b"damaged")
    engine = Engine.__new__(Engine)
    engine._llm, engine._engine_output = SimpleNamespace(collective_rpc=collective_rpc), SimpleNamespace(forget=list)
    with pytest.raises(error):
        await engine._stage(version)
    assert all(queue.empty() for queue in answers)


def test_only_added_tokens_are_stop_tokens():
    """A new line is a part of many longer tokens: each turn was sampled on to its limit."""
    from cusearch_async.models import load_tokenizer
    from cusearch_async.rollout.engine import Engine
    from tests.fakes import STARTER

    engine = Engine.__new__(Engine)
    engine._tokenizer, engine._stop_settings = load_tokenizer(str(STARTER)), {}
    assert "stop" in engine._stopping_at((".",))
    assert "stop_token_ids" in engine._stopping_at(("</search>",))
