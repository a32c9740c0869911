"""Which GPUs the processes of a run have, and how much memory one has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cusearch_async.cli.preflight.finding import Finding
from cusearch_async.cli.preflight.sizing import GIB
from cusearch_async.config import Config
from cusearch_async.lifecycle.cuda import count_gpus, is_cpu_meant, visible_said
from cusearch_async.lifecycle.gpus import Division, division_of, may_share

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
    config. None for a run on a CPU: no GPU is here or named, and they are hidden, the model is float32, or the engines
    have cores."""
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
    if not named and (is_cpu_meant() or config.model.dtype == "float32" or config.rollout.cores):
        return None
    return Device(ASSUMED_GIB, "assumed; set --gpu-gib or run.gpu_gib, or CUDA_VISIBLE_DEVICES= (empty) for a CPU")


def shared_gpus(config: Config) -> list[int]:
    """Those that the learner has together with an engine, of a worker or of the evaluator."""
    learner, *engines = _owners(config).values()
    return sorted({*learner} & {gpu for gpus in engines for gpu in gpus})


def _owners(config: Config) -> dict[str, list[int]]:
    """Kind of process -> its GPUs, as `cusearch launch` divides them; as the config names them where it could not."""
    division, size = _division(config), config.rollout.workers * config.rollout.vllm.tensor_parallel_size
    learner, rollout, evaluator = config.learner.gpus, config.rollout.gpus[:size], config.eval.gpus
    if division is not None:
        workers = [gpu for group in division.workers for gpu in group]
        learner, rollout, evaluator = (tuple(map(int, of)) for of in (division.learner, workers, division.evaluator))
    owners = {"learner": list(learner[: config.learner.ranks_per_node]), "rollout": list(rollout)}
    return owners | ({"evaluator": list(evaluator)} if config.eval.every else {})


def _division(config: Config) -> Division | None:
    there, named = map(str, range(_counted(config))), map(str, config.rollout.gpus)
    return division_of(config, tuple(there), tuple(named)) if _counted(config) else None


def _counted(config: Config) -> int:
    """This machine's GPUs, or all up to the last that the config names: another machine may have them."""
    evaluator = config.eval.gpus if config.eval.every else ()
    return max(count_gpus(), 0, *(gpu + 1 for gpu in (*config.learner.gpus, *config.rollout.gpus, *evaluator)))


def _of_retriever(config: Config) -> list[int]:
    retriever, device = config.retriever, config.retriever.dense.device
    is_used = device.startswith("cuda") and (retriever.backend == "dense" or retriever.rerank.model)
    return [int(device.partition(":")[2] or 0)] if is_used else []


def named_gpus(config: Config) -> Finding:
    """Who has which GPU: none may belong to two processes, except the learner's and an engine's that has a share of
    it."""
    owners, shared, share = _owners(config), shared_gpus(config), config.rollout.vllm.gpu_memory_utilization
    had = [gpu for gpus in owners.values() for gpu in gpus]
    twice = sorted({gpu for gpu in had if had.count(gpu) > (2 if gpu in shared else 1)})
    text = ", ".join(f"{name} {gpus}" for name, gpus in owners.items())
    if twice:
        return Finding("error", "GPUs", f"{_listed(twice)} more than once in {text}; give each process its own GPU")
    if shared and not may_share(config):
        advice = "set rollout.vllm.gpu_memory_utilization to the share of the GPU that the engine may take"
        text = f"{_listed(shared)} twice in {text}; {advice}, or give each process its own GPU"
        return Finding("error", "GPUs", text)
    if _division(config) is None:
        return _undivided(config)
    if shared:
        text += f"; {_listed(shared)} {'in turn' if config.run.colocate else f'shared, {share:.0%} for the engine'}"
    unused = {*range(count_gpus())} - {*had, *_of_retriever(config)}
    if unused and not (config.learner.gpus and config.rollout.gpus):
        text += f"; {len(unused)} of {count_gpus()} GPUs are not used: rollout.workers, learner.ranks"
        return Finding("warning", "GPUs", text)
    return Finding("ok", "GPUs", text)


def _undivided(config: Config) -> Finding:
    """Why it is not known how `cusearch launch` divides the GPUs."""
    workers, size = config.rollout.workers, config.rollout.vllm.tensor_parallel_size
    if not _counted(config):
        return Finding("ok", "GPUs", "not set: learner gets the last GPUs, then evaluator, workers the rest")
    if 0 < len(config.rollout.gpus) < workers * size:
        text = f"rollout.gpus {list(config.rollout.gpus)} are too few for rollout.workers = {workers} on one machine"
        advice = f"`cusearch launch` needs {workers * size}; on several machines each takes its own"
        return Finding("warning", "GPUs", f"{text}: {advice}")
    text = (
        f"{_counted(config)} GPUs ({'on this machine' if count_gpus() else 'no more are named'}) are too few for "
        f"{config.learner.ranks_per_node} of the learner and {size} for each engine ({workers} for rollout.workers"
        f"{', 1 for the evaluator' if config.eval.every else ''}): `cusearch launch` needs more; on several machines "
        "each takes its own"
    )
    return Finding("warning", "GPUs", text)


def gpus_here(config: Config) -> Iterator[Finding]:
    """Whether the named GPUs exist on this machine. Not an error: a config may be checked on another machine."""
    named = [*config.learner.gpus, *config.rollout.gpus, *config.eval.gpus, *_of_retriever(config)]
    there = count_gpus() if named else 0
    missing = sorted({gpu for gpu in named if gpu >= there})
    if missing:
        text = (
            f"{_listed(missing)} of learner.gpus, rollout.gpus, eval.gpus and retriever.dense.device are "
            f"missing: CUDA finds {there} GPUs on this machine, which are counted from 0{visible_said()}"
        )
        yield Finding("not reachable", "GPUs here", text)


def _listed(gpus: list[int]) -> str:
    return ", ".join(map(str, gpus))
