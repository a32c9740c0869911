"""Which memory a GPU of the run has, or that the run is for a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from cusearch_async.cli.preflight.sizing import GIB
from cusearch_async.config import Config
from cusearch_async.lifecycle.cuda import count_gpus, is_cpu_meant

ASSUMED_GIB = 80.0


@dataclass(frozen=True, slots=True)
class Device:
    gib: float
    """Memory of one GPU."""
    source: str
    """Where that is from."""

    @property
    def bytes(self) -> int:
        return int(self.gib * GIB)


def device_of(config: Config, given_gib: float | None) -> Device | None:
    """The smallest GPU of this machine that the run would use, unless a size is given; without one here, that of the
    config. None for a run on a CPU: no GPU is here or named, and they are hidden, or the model is float32."""
    if given_gib is not None:
        return Device(given_gib, "--gpu-gib")
    here = None if is_cpu_meant() else _smallest_here(config)
    if here is not None:
        return here
    if config.run.gpu_gib is not None:
        return Device(config.run.gpu_gib, "run.gpu_gib")
    named = config.learner.gpus or config.rollout.gpus
    if not named and (is_cpu_meant() or config.model.dtype == "float32"):
        return None
    return Device(ASSUMED_GIB, "assumed; say it with --gpu-gib or run.gpu_gib")


def _smallest_here(config: Config) -> Device | None:
    count = count_gpus()
    named = {*config.learner.gpus, *config.rollout.gpus}
    found = [index for index in range(count) if index in named or not named]
    if not found:
        return None
    import torch  # noqa: PLC0415  (seconds, and only with a GPU)

    properties = [torch.cuda.get_device_properties(index) for index in found]
    smallest = min(properties, key=lambda known: known.total_memory)
    return Device(smallest.total_memory / GIB, f"{smallest.name} of this machine")
