"""One rank of a learner as a process of its own: python -m tests.system.learner_script FOLDER NAME.

Trains on fixed trajectories; writes FOLDER/weights-NAME.safetensors, the last step's FOLDER/report-NAME.json and
the gradient of the first mini-batch, before clipping, as FOLDER/gradient-NAME.safetensors."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cusearch_async.config import load_config
from cusearch_async.lifecycle.entry import split_overrides
from cusearch_async.lifecycle.placement import configure_process

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cusearch_async.types import Trajectory


def fixed_trajectories(count: int = 10, longest: int = 60) -> tuple[list[Trajectory], NDArray[np.float64]]:
    """Trajectories of `longest` / 12 to `longest` sampled tokens at depths 0 to 5, and their advantages."""
    import numpy as np

    from tests.strategies import make_trajectory

    rng = np.random.default_rng(0)
    selected = []
    for ticket in range(count):
        sampled = int(rng.integers(longest // 12, longest))
        length = 8 + sampled + 2
        logprobs = rng.normal(-3, 0.3, sampled).astype(np.float32)
        token_ids = rng.integers(0, 370, length).astype(np.int32)
        selected.append(
            make_trajectory(ticket, prompt=8, sampled=sampled, token_ids=token_ids, logprobs=logprobs, depth=ticket % 6)
        )
    return selected, rng.normal(size=len(selected))


def with_copies(
    selected: list[Trajectory], advantages: NDArray[np.float64]
) -> tuple[list[Trajectory], NDArray[np.float64]]:
    """Two rollouts more of each of the first four tickets with the same tokens, but sampled with other probabilities,
    and with advantages of their own; a third of all advantages is 0. Two trajectories have two rows, the second of
    which begins with what was an observation."""
    from dataclasses import replace

    import numpy as np

    rng = np.random.default_rng(1)
    selected = [
        *selected,
        *(
            replace(t, rollout=copy, logprobs=t.logprobs + rng.normal(0, 0.3, len(t.logprobs)).astype(np.float32))
            for t in selected[:4]
            for copy in (1, 2)
        ),
    ]
    advantages = np.concatenate([advantages, rng.normal(size=len(selected) - len(advantages))])
    advantages[::3] = 0
    for place in (4, 5):
        observation = 8 + len(selected[place].logprobs) // 2
        selected[place] = replace(selected[place], starts=(0, observation))
    return selected, advantages


def record_first_gradient(engine: Any) -> dict[str, Any]:
    """Filled with the whole gradient, summed over ranks, at the first optimizer step, whatever the ZeRO stage."""
    from deepspeed.utils import safe_get_full_grad

    gradients: dict[str, Any] = {}
    step = engine.optimizer.step

    def recording_step(*arguments: Any, **named: Any) -> Any:
        if not gradients:
            for name, parameter in engine.module.named_parameters():
                if parameter.requires_grad:
                    gradients[name] = safe_get_full_grad(parameter).clone()
        return step(*arguments, **named)

    engine.optimizer.step = recording_step
    return gradients


def count_forwards(model: Any) -> list[int]:
    """Filled with how often each layer's MLP is begun; a recomputation stops as soon as it has what it needs."""
    counts = [0] * len(model.model.layers)

    def count(number: int) -> Any:
        def hook(*_: Any) -> None:
            counts[number] += 1

        return hook

    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(count(number))
    return counts


def update_while_lent(learner: Any, for_s: float, *arguments: Any) -> Any:
    """An update that begins while the weights are lent. They must not change before they are given back; ZeRO-3 lends
    copies."""
    import torch

    lent = learner.lend()
    before = {name: tensor.clone() for name, tensor in lent.tensors.items()}
    has_gradient = threading.Event()
    refuse_faults, reports = learner._refuse_faults, []

    def noting(update: Any) -> None:
        refuse_faults(update)
        has_gradient.set()

    learner._refuse_faults = noting
    thread = threading.Thread(target=lambda: reports.append(learner.update(*arguments)), daemon=True)
    thread.start()
    assert has_gradient.wait(120)
    thread.join(30 if learner._engine.is_sharded else for_s)
    assert thread.is_alive() is not learner._engine.is_sharded, "the optimizer step waits"
    assert all(torch.equal(tensor, before[name]) for name, tensor in lent.tensors.items())
    lent.release()
    thread.join()
    after = learner.lend()
    after.release()
    assert not all(torch.equal(tensor, before[name]) for name, tensor in after.tensors.items())
    return reports[0]


def offload_and_reload(learner: Any) -> None:
    """As a learner that takes turns; its policy is the same afterwards."""
    lent = learner.lend()
    before = {name: tensor.clone() for name, tensor in lent.tensors.items()}
    lent.release()
    learner.offload()
    learner.reload()
    after = learner.lend()
    after.release()
    assert all(tensor.equal(after.tensors[name]) for name, tensor in before.items())


SHAKEN = 0.002
"""Size of an adapter's B, with which its policy is near its reference, but not the same."""


def shake(model: Any) -> None:
    """Give the adapter of `model` a B that is not zero, the same on all ranks; where B is zero, A has no gradient."""
    import deepspeed
    import torch

    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                values = torch.randn(parameter.shape, generator=generator) * SHAKEN
                parameter.copy_(values)


def options() -> tuple[argparse.Namespace, list[str]]:
    """The command line, and the settings in it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--from-step", type=int, default=0)
    parser.add_argument("--to-step", type=int, default=2)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--save-loaded", type=Path)
    parser.add_argument("--trajectories", type=int, nargs=2, default=(10, 60))
    parser.add_argument("--ones", action="store_true", help="all advantages are 1")
    parser.add_argument("--copies", action="store_true", help="several rollouts have the same tokens")
    parser.add_argument("--question-kib", type=int, default=0, help="each trajectory has a question so long")
    parser.add_argument("--lend", type=float, metavar="SECONDS")
    parser.add_argument("--offload", action="store_true", help="before every step")
    parser.add_argument("--shake", action="store_true", help="begin with an adapter whose B is not zero")
    parser.add_argument("--poison", choices=("weight", "gradient"))
    own, overrides = split_overrides(sys.argv[1:])
    return parser.parse_args(own), overrides


def chosen(arguments: argparse.Namespace) -> tuple[list[Trajectory], NDArray[np.float64]]:
    """What is trained on, and its advantages."""
    import numpy as np

    selected, advantages = fixed_trajectories(*arguments.trajectories)
    selected = [dataclasses.replace(t, question=f"why{'?' * 1024 * arguments.question_kib}") for t in selected]
    if arguments.ones:
        advantages = np.ones_like(advantages)
    if arguments.copies:
        selected, advantages = with_copies(selected, advantages)
    if arguments.poison == "gradient":
        advantages *= 1e38  # the loss is finite, what flows back through the network is not
    return selected, advantages


def main() -> None:
    arguments, overrides = options()
    configure_process([])

    import torch
    from safetensors.torch import save_file

    from cusearch_async.errors import NonFiniteUpdate
    from cusearch_async.learner.learner import DeepSpeedLearner
    from cusearch_async.learner.ranks import Ranks

    atlas = Path(__file__).parents[2] / "configs" / "atlas.toml"
    config = load_config(atlas, overrides)
    selected, advantages = chosen(arguments)
    ranks = Ranks(config.learner.collective_timeout_s)
    learner = DeepSpeedLearner(config, ranks)
    if arguments.poison == "weight":
        with torch.no_grad():
            learner._module.model.lm_head.weight[int(selected[3].token_ids[-1])] = float("nan")
    if arguments.shake:
        shake(learner._module.model)
    # hooks of layers would each be compiled
    forwards = [] if config.learner.compile else count_forwards(learner._module.model)
    # DeepSpeed's maps of gradients are wrong where parameters do not lie in their own order
    is_mapped = "round_robin_gradients" not in config.learner.deepspeed.zero_optimization
    gradients = record_first_gradient(learner._engine.deepspeed) if is_mapped else {}
    if arguments.load:
        learner.load(arguments.load)
    if not ranks.is_leader:
        learner.follow()
        ranks.close()
        return
    if arguments.save_loaded:
        learner.capture(arguments.save_loaded)()
    report: dict[str, Any] = {}
    try:
        for step in range(arguments.from_step, arguments.to_step):
            update = functools.partial(update_while_lent, learner, arguments.lend) if arguments.lend else learner.update
            if arguments.offload:
                offload_and_reload(learner)
            report = update(selected, advantages, step)
    except NonFiniteUpdate as error:
        report = {"refused": str(error)}
    if arguments.save:
        learner.capture(arguments.save)()
    if ranks.size == 1 or "refused" not in report:  # a refusal ends the other ranks
        weights = {name: tensor.clone() for name, tensor in learner.lend().tensors.items()}
        save_file(weights, arguments.folder / f"weights-{arguments.name}.safetensors")
        learner.stop(is_finished=True)
        ranks.close()
    (arguments.folder / f"forwards-{arguments.name}.json").write_text(json.dumps(forwards))
    save_file(gradients, arguments.folder / f"gradient-{arguments.name}.safetensors")
    (arguments.folder / f"report-{arguments.name}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
