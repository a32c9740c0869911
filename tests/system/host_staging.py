"""What vLLM's worker does with new weights where a model cannot have a shadow, here on any. vLLM imports this."""

from __future__ import annotations

from cusearch_async.rollout import staging


class StagesInTheHostsMemory(staging.StagesWeights):
    def stage_weights(self, file: str) -> None:
        self.staged = staging.LOADER.submit(staging.read_tensors, file, self.device)
