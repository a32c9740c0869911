"""π_ref in the host's memory: on the device for its pass, and only then."""

from __future__ import annotations

import contextlib

import pytest
import torch

from cusearch_async.learner.model import whole_reference


def tied() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[1].weight = module[0].weight
    return module


@pytest.mark.parametrize("waits", [True, False])
def test_a_reference_is_the_same_after_its_pass_even_one_that_failed(waits):
    module, inputs = tied(), torch.ones(1, 3)
    wanted = module(inputs).detach()
    before = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    reference = whole_reference(module, torch.device("cpu"), waits)
    with contextlib.suppress(KeyError), reference() as forward:
        assert torch.equal(forward(inputs), wanted)
        raise KeyError
    assert {name: parameter.data_ptr() for name, parameter in module.named_parameters()} == before
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_reference_that_waits_is_on_the_gpu_for_its_pass_only():
    module = tied()
    reference = whole_reference(module, torch.device("cuda"), waits_on_host=True)
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
    with reference() as forward:
        assert {parameter.device.type for parameter in module.parameters()} == {"cuda"}
        assert module[0].weight is module[1].weight
        assert forward(torch.ones(1, 3, device="cuda")).device.type == "cuda"
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
