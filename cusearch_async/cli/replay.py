"""`cusearch replay RUN_FOLDER --step N`: recomputes a recorded step, or shows what another method would have taken."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from cusearch_async.cli.parts.arguments import add_run_folder
from cusearch_async.errors import ReplayDiffers
from cusearch_async.lifecycle.placement import configure_process, count_sharers
from cusearch_async.replay.selection import Choice, RecordedStep, checkpoint_before, with_method
from cusearch_async.run.history import made_otherwise, start_now


def add(parser: argparse.ArgumentParser) -> None:
    add_run_folder(parser)
    parser.add_argument("--method", help="show what this method would have taken; its settings as --method.KEY VALUE")
    text = "make the update again too, from the checkpoint before it, and compare metrics and weights"
    parser.add_argument("--update", action="store_true", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Raises: ConfigError; ReplayDiffers when the step's own method does not choose as it did."""
    step = RecordedStep.read(arguments.folder, arguments.step)
    console = Console()
    again = step.choose(step.config)
    choices = {f"{step.config.method.name}, recorded": step.recorded, "recomputed": again}
    if arguments.method or overrides:
        config = with_method(step.config, arguments.method, overrides)
        choices[config.method.name] = step.choose(config)
    console.print(_table(step, choices))
    if not again.is_same(step.recorded):
        raise ReplayDiffers(f"step {arguments.step} was not chosen as it would be now: see the table")
    console.print("the selection and its advantages are identical, bit for bit", soft_wrap=True)
    if arguments.update:
        _update(step, arguments.folder, console)


def _table(step: RecordedStep, choices: dict[str, Choice]) -> Table:
    pool = step.pool.trajectories
    recorded = set(step.record.selected)
    title = f"step {step.record.step}: {len(pool)} trajectories"
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    shown.add_column("", no_wrap=True)
    for name in ("whole pool", *choices):
        shown.add_column(name, justify="right")
    everything = np.arange(len(pool))
    sets = [everything, *(choice.indices for choice in choices.values())]
    s_max = step.config.episode.s_max
    depths = np.array([t.depth for t in pool], dtype=np.int64)
    rewards, tokens = np.array([t.reward for t in pool]), np.array([t.sampled_tokens for t in pool])
    rows = {
        "trajectories": [str(len(indices)) for indices in sets],
        "of the recorded ones": ["", *(str(len(recorded & set(c.indices.tolist()))) for c in choices.values())],
        **{f"  of depth {s}": [str(int((depths[i] == s).sum())) for i in sets] for s in range(s_max + 1)},
        "mean depth": [_mean(depths[indices]) for indices in sets],
        "mean reward": [_mean(rewards[indices]) for indices in sets],
        "sampled tokens": [str(tokens[indices].sum()) for indices in sets],
        "mean |advantage|": ["", *(_mean(np.abs(c.advantages)) for c in choices.values())],
        "without advantage": ["", *(str(int((c.advantages == 0).sum())) for c in choices.values())],
    }
    for name, cells in rows.items():
        shown.add_row(name, *cells)
    return shown


def _mean(values: np.ndarray[tuple[int], np.dtype[np.generic]]) -> str:
    return f"{values.mean():.3f}" if len(values) else "–"


def _update(step: RecordedStep, folder: Path, console: Console) -> None:
    """Raises: ReplayDiffers, with what differs between how the update was made and how it is made now."""
    checkpoint = checkpoint_before(folder, step.record.step, step.config.learner)
    configure_process(step.config.learner.cores, sharers=count_sharers(step.config))
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    import torch  # noqa: PLC0415  (reads the settings above when it is loaded)

    from cusearch_async.learner.learner import DeepSpeedLearner  # noqa: PLC0415
    from cusearch_async.learner.ranks import Ranks  # noqa: PLC0415
    from cusearch_async.replay.update import replay_update  # noqa: PLC0415

    if step.start:
        torch.set_num_threads(step.start.computing.threads)
    learner = DeepSpeedLearner(step.config, Ranks(step.config.learner.collective_timeout_s))
    found, number = replay_update(step, folder, checkpoint, learner), step.record.step
    differing = {name: values for name, values in found.metrics.items() if values[0] != values[1]}
    tensors = found.differing_tensors
    weights = "the weights are identical"
    if tensors is None:
        weights = f"version {number + 1} is not kept, so the weights are not compared"
    elif tensors:
        weights = f"{len(tensors)} parameters differ from version {number + 1}"
    same = len(found.metrics) - len(differing)
    console.print(f"update: {same} of {len(found.metrics)} metrics are identical; {weights}", soft_wrap=True)
    if not found.is_same:
        named = ", ".join(f"{name}: {was} -> {now}" for name, (was, now) in list(differing.items())[:4])
        raise ReplayDiffers(
            f"the update of step {number} is not what it was: {named or ', '.join((tensors or [])[:4])}; "
            f"{_causes(step)}"
        )


def _causes(step: RecordedStep) -> str:
    """The difference between how the update is made now and how it was made."""
    before = step.start
    if before is None:
        return f"what it was made with is not known: starts/{step.record.epoch:04d}.json cannot be read"
    changes = made_otherwise(before, start_now(step.config, before.epoch, before.step, before.contract, before.nonce))
    listed = ", ".join(map(str, changes))
    return f"it was made with other than now: {listed}" if listed else "it is made with what it was made with"
