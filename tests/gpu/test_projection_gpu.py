"""The projected gradients of `cusearch align` on a GPU: those of a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]


def test_projected_gradients_in_float32_are_those_of_the_cpu(monkeypatch):
    from cusearch_async.config import STARTER, load_config
    from cusearch_async.learner.projection import ProjectedGradients
    from tests.learner.test_projection import episode

    config = load_config(Path("atlas"), ["--model.dtype", "float32"])
    episodes = [episode(seed, answer=7 + 3 * seed) for seed in range(4)]
    found = ProjectedGradients(str(STARTER), config).of(episodes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wanted = ProjectedGradients(str(STARTER), config).of(episodes)
    for part in ("all", "search"):
        assert np.abs(wanted[part]).max() > 0
        assert found[part] == pytest.approx(wanted[part], abs=1e-2 * float(np.abs(wanted[part]).max()))
