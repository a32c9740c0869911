"""Which GPUs the processes of a run have, and how much memory one has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cusearch_async.cli.preflight.finding import Finding
from cusearch_async.cli.preflight.sizing import GIB
from cusearch_async.config import Config
from cusearch_async.lifecycle.cuda import count_gpus, is_cpu_meant

ASSUMED_GIB = 80.0


@dataclass(frozen=True, slots=True)
class Device:
    gib: float
    """Memory of one GPU."""
    source: str

    @property
    def bytes(self) -> int:
        return int(self.gib * GIB)


def device_of(config: Config, given_gib: float | None) -> Device | None:
    """The smallest GPU of this machine that the run would use, unless a size is given; without one here, that of the
    config. None for a run on a CPU: no GPU is here or named, and they are hidden, or the model is float32."""
    if given_gib is not None:
        return Device(given_gib, "--gpu-gib")
    named = {*config.learner.gpus, *config.rollout.gpus}
    here = 0 if is_cpu_meant() else count_gpus()
    found = [index for index in range(here) if index in named or not named]
    if found:
        import torch  # noqa: PLC0415  (seconds, and only with a GPU)

        smallest = min(map(torch.cuda.get_device_properties, found), key=lambda known: known.total_memory)
        return Device(smallest.total_memory / GIB, f"{smallest.name} of this machine")
    if config.run.gpu_gib is not None:
        return Device(config.run.gpu_gib, "run.gpu_gib")
    if not named and (is_cpu_meant() or config.model.dtype == "float32"):
        return None
    return Device(ASSUMED_GIB, "assumed; set --gpu-gib or run.gpu_gib")


def shared_gpus(config: Config) -> list[int]:
    return sorted({*_of_learner(config)} & {*_of_rollout(config)})


def _of_learner(config: Config) -> tuple[int, ...]:
    return config.learner.gpus[: config.learner.ranks_per_node]


def _of_rollout(config: Config) -> tuple[int, ...]:
    return config.rollout.gpus[: config.rollout.workers * config.rollout.vllm.tensor_parallel_size]


def named_gpus(config: Config) -> Finding:
    """Whether no GPU belongs to two processes, except the learner's and a worker's whose engine has a share of it."""
    learner, rollout, vllm = _of_learner(config), _of_rollout(config), config.rollout.vllm
    evaluator = config.eval.gpus if config.eval.every else ()
    named, shared = [*learner, *rollout, *evaluator], shared_gpus(config)
    both = f"learner.gpus {list(learner)}, rollout.gpus {list(rollout)} and eval.gpus {list(evaluator)}"
    twice = sorted({gpu for gpu in named if named.count(gpu) > (2 if gpu in shared else 1)})
    share, needed = vllm.gpu_memory_utilization, config.rollout.workers * vllm.tensor_parallel_size
    if twice:
        text = f"{_listed(twice)} more than once in {both}; give each process its own GPU"
        return Finding("error", "GPUs", text)
    if shared and not config.run.colocate and share is None:
        advice = "set rollout.vllm.gpu_memory_utilization to the share of the GPU that the engine may take"
        text = f"{_listed(shared)} twice in {both}; {advice}, or give each process its own GPU"
        return Finding("error", "GPUs", text)
    if not named:
        return Finding("ok", "GPUs", "not set: learner gets the last GPUs, then evaluator, workers the rest")
    if rollout and len(rollout) < needed:
        text = f"rollout.gpus {list(rollout)} are too few for rollout.workers = {config.rollout.workers} on one machine"
        advice = f"`cusearch launch` needs {needed}; on several machines each takes its own"
        return Finding("warning", "GPUs", f"{text}: {advice}")
    owners = {"learner": learner, "rollout": rollout} | ({"evaluator": evaluator} if config.eval.every else {})
    text = ", ".join(f"{name} {list(gpus) or 'some of those that the others leave'}" for name, gpus in owners.items())
    if shared:
        text += f"; {_listed(shared)} {'in turn' if config.run.colocate else f'shared, {share:.0%} for the engine'}"
    return Finding("ok", "GPUs", text)


def gpus_here(config: Config) -> Iterator[Finding]:
    """Whether the named GPUs exist on this machine. Not an error: a config may be checked on another machine."""
    retriever = config.retriever
    named = [*config.learner.gpus, *config.rollout.gpus, *config.eval.gpus]
    if retriever.dense.device.startswith("cuda") and (retriever.backend == "dense" or retriever.rerank.model):
        named.append(int(retriever.dense.device.partition(":")[2] or 0))
    there = count_gpus() if named else 0
    missing = sorted({gpu for gpu in named if gpu >= there})
    if missing:
        text = (
            f"{_listed(missing)} of learner.gpus, rollout.gpus, eval.gpus and retriever.dense.device are "
            f"missing: CUDA finds {there} GPUs on this machine"
        )
        yield Finding("not reachable", "GPUs here", text)


def _listed(gpus: list[int]) -> str:
    return ", ".join(map(str, gpus))
