"""What the canary allows, on the shipped starters: the rounding of kernels, and not the weights of an optimizer step
before. No GPU: attention with TF32's operands is emulated."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from xxhash import xxh3_128_hexdigest

from cusearch_async.config.run import STARTERS
from cusearch_async.learner.canary import canary_ids, canary_tolerance
from cusearch_async.learner.model import load_causal_lm
from cusearch_async.models import load_tokenizer
from cusearch_async.rollout.staleness_check import Loaded, stale_tensors
from cusearch_async.weights.tensor_file import TensorRecord

pytestmark = pytest.mark.system  # it loads models

DEMO_LR = 5e-5


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To the nearest of TF32's numbers, which have 10 bits of mantissa where float32's have 23."""
    return truncated((x.contiguous().view(torch.int32) + (1 << 12)).view(torch.float32))


def truncated(x: torch.Tensor) -> torch.Tensor:
    """Without TF32's missing bits, as a tensor core reads float32."""
    return (x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


def attention_in_tf32(how):
    """Attention as Triton's kernel computes it: QK and PV of TF32's operands, all else in float32."""

    def attend(module, query, key, value, mask, scaling, **_):
        groups = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(groups, 1) for heads in (key, value))
        scores = how(query) @ how(key).transpose(-1, -2) * scaling
        length = scores.shape[-1]
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        shares = (scores - scores.amax(-1, keepdim=True)).exp()
        output = how(shares) @ how(value) / shares.sum(-1, keepdim=True)
        return output.transpose(1, 2).contiguous(), None

    return attend


KERNELS = (rounded, truncated)
for how in KERNELS:
    ALL_ATTENTION_FUNCTIONS.register(how.__name__, attention_in_tf32(how))


@torch.no_grad()
def scores(model, ids) -> torch.Tensor:
    log_p = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
    return log_p.gather(-1, ids[0, 1:, None]).squeeze(-1)


def step(model) -> None:
    """One of the demo's optimizer steps, on a text of random tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=DEMO_LR, weight_decay=0.0)
    ids = torch.randint(0, 370, (8, 60), generator=torch.Generator().manual_seed(0))
    model(ids, labels=ids).loss.backward()
    optimizer.step()


def records(model) -> dict[str, TensorRecord]:
    named = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return {name: TensorRecord([*p.shape], "F32", xxh3_128_hexdigest(p.numpy().tobytes())) for name, p in named}


@pytest.mark.parametrize("starter", STARTERS)
def test_an_engine_in_tf32_is_right_and_one_with_weights_of_a_step_before_is_not(starter):
    path = str(STARTERS[starter])
    ids = torch.tensor([canary_ids(load_tokenizer(path), 1000)])
    learner = load_causal_lm(path, "float32").eval()
    old = scores(learner, ids)
    engines = [scores(load_causal_lm(path, "float32", how.__name__).eval(), ids) for how in KERNELS]
    allowed, strict = canary_tolerance("float32", "cuda"), canary_tolerance("float32", "cpu")
    for engine in engines:
        assert 2 * strict < float((engine - old).abs().mean()) < allowed / 2
    before = records(learner)
    step(learner)
    new, after = scores(learner, ids), records(learner)
    for engine in engines:  # they still have the old weights
        assert float((engine - new).abs().mean()) > 5 * allowed
    kept = {name: frozenset([record.xxh3]) for name, record in before.items()}
    assert stale_tensors(Loaded(before, kept), Loaded(after, kept)) == sorted(before), "checksums name each"


def test_bfloat16_is_allowed_what_its_rounding_makes():
    path = str(STARTERS["atlas"])
    ids = torch.tensor([canary_ids(load_tokenizer(path), 1000)])
    in_float32, in_bfloat16 = (scores(load_causal_lm(path, dtype).eval(), ids) for dtype in ("float32", "bfloat16"))
    assert float((in_float32 - in_bfloat16).abs().mean()) < canary_tolerance("bfloat16", "cuda") == 0.1
