"""What a rollout worker knows before it plays its first episode."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from cusearch_async.config import load_config
from cusearch_async.errors import BufferUnavailable
from cusearch_async.models import vocab_size
from tests.fakes import STARTER

pytestmark = pytest.mark.system


class QuietBuffer:
    async def check_contract(self):
        pass


async def test_a_worker_hands_its_buffer_no_token_that_the_model_does_not_have(atlas_config, monkeypatch):
    from cusearch_async.processes import rollout

    sizes = []

    @asynccontextmanager
    async def open_buffer(config, patience_s=0.0, stop=None, vocab_size=None, contract=None):
        sizes.append(vocab_size)
        if len(sizes) == 2:
            raise BufferUnavailable("far enough")
        yield QuietBuffer()

    monkeypatch.setattr(rollout, "open_buffer", open_buffer)
    with pytest.raises(BufferUnavailable, match="far enough"):
        await rollout.run(load_config(atlas_config), "worker-1")
    assert sizes[-1] == vocab_size(str(STARTER)) == 384
