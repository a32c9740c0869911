"""One side of `make bench-learner`, a process of its own: python update_case.py SIDE CASE.json

SIDE `bare` makes the passes of `learner` over the same micro-batches with transformers and torch alone; every other is
the learner of the cusearch_async that PYTHONPATH names, of this or an earlier commit, with its SETTINGS. For each line
on its input it makes one update, and prints the CPU seconds that it took. One update comes before, which compiles what
is compiled.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

Update = Callable[[int], Any]
"""Makes the update of a step."""

SETTINGS = {
    "learner": {},
    "compiled": {"learner.compile": "true"},
    "packed": {"learner.packing": "true", "learner.attention": "varlen"},
    "packed_sdpa": {"learner.packing": "true"},
    "bare": {},
}
"""Side -> what differs from the settings of the case."""


def read_pool(path: str, most: int) -> tuple[list[Any], Any]:
    """The first `most` trajectories of what `record_pools` wrote, and their advantages."""
    from tests.strategies import make_trajectory

    with np.load(path) as file:
        pool = {name: file[name] for name in file.files}
    sampled = pool["sampled"]
    ends = np.cumsum(pool["tokens"])
    selected, value = [], 0
    for row, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        mask = sampled[start:end].copy()
        count = int(mask.sum())
        plain = make_trajectory(int(pool["ticket"][row]), int(pool["rollout"][row]), sampled=count)
        changed = {
            "depth": int(pool["depth"][row]),
            "token_ids": pool["token_ids"][start:end].astype(np.int32),
            "sampled": mask,
            "logprobs": pool["logprobs"][value : value + count].copy(),
            "versions": pool["versions"][value : value + count].astype(np.int32),
        }
        selected.append(replace(plain, **changed))
        value += count
    return selected[:most], pool["advantages"][:most]


def config_of(case: dict[str, Any]) -> Any:
    from cusearch_async.config import load_config

    overrides = [word for key, value in case["settings"].items() for word in (f"--{key}", str(value))]
    return load_config([Path(name) for name in case.get("configs", ["configs/atlas.toml"])], overrides)


def learner(case: dict[str, Any]) -> Update:
    config = config_of(case)
    selected, advantages = read_pool(case["pool"], case["trajectories"])
    try:
        from cusearch_async.learner.ranks import Ranks

        ranks: Any = Ranks(600)
    except ImportError:  # the commit that is compared with
        from cusearch_async.training.team import Team

        ranks = Team()
    from cusearch_async.learner.learner import DeepSpeedLearner

    trainer = DeepSpeedLearner(config, ranks)
    return lambda step: trainer.update(selected, advantages, step)


def bare(case: dict[str, Any]) -> Update:
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    from cusearch_async.learner import matmul
    from cusearch_async.learner.model import train_upper_layers
    from cusearch_async.learner.plan import plan_update

    config = config_of(case)
    selected, advantages = read_pool(case["pool"], case["trajectories"])
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(config.model.location, dtype=getattr(torch, config.model.dtype))
        for _ in range(2)
    )
    for model in (policy, reference):
        matmul.use_fastest(model, config.learner)
    if config.learner.trained_layers:
        train_upper_layers(policy, config.learner.trained_layers, config.model.location)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.learner.lr, weight_decay=config.learner.weight_decay)

    def logprobs(model: Any, micro: Any) -> Any:
        ids, sampled = micro.inputs.token_ids, micro.inputs.sampled
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[sampled - 1]
        return -cross_entropy(model.lm_head(hidden), ids.flatten()[sampled], reduction="none")[micro.computed]

    def update(step: int) -> None:
        plan = plan_update(selected, advantages, step, config)
        with torch.no_grad():
            proximal = {micro: logprobs(policy, micro) for part in plan.minibatches[1:] for micro in part}
            refs = {micro: logprobs(reference, micro) for micro in plan.micro_batches} if config.loss.kl_coef else {}
        for part in plan.minibatches:
            for micro in part:
                with torch.set_grad_enabled(micro.has_gradient):
                    log_policy = logprobs(policy, micro)
                    log_prox = proximal.get(micro, log_policy.detach())
                    weight = (log_prox - micro.log_behaviour).exp().clamp(max=2)
                    ratio = (log_policy - log_prox).exp()
                    surrogate = torch.minimum(ratio * micro.advantages, ratio.clamp(0.8, 1.2) * micro.advantages)
                    loss = -weight * surrogate
                    if refs:
                        delta = refs[micro] - log_policy
                        loss = loss + config.loss.kl_coef * (delta.exp() - delta - 1)
                    if micro.has_gradient:
                        (micro.aggregation * loss).sum().backward()
            torch.nn.utils.clip_grad_norm_(trained, config.learner.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    return update


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to standard output
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    side, case = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    import torch

    torch.set_num_threads(1)
    case["settings"] |= SETTINGS[side]
    update = bare(case) if side == "bare" else learner(case)
    update(0)
    answers.write("ready\n")
    for step, _ in enumerate(sys.stdin, 1):
        began = time.process_time()
        update(step)
        answers.write(f"{time.process_time() - began}\n")


if __name__ == "__main__":
    main()
