"""One of two ranks, of which the second stops itself before the first collective of DeepSpeed: python -m
tests.system.half_a_meeting SETTINGS. The last line but one is how many seconds the first has waited."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from cusearch_async.config import load_config
from cusearch_async.lifecycle.entry import exit_with_one_line
from cusearch_async.lifecycle.placement import configure_process


def main() -> None:
    configure_process([])

    import torch

    from cusearch_async.learner.deepspeed_engine import DeepSpeedEngine
    from cusearch_async.learner.ranks import Ranks

    config = load_config(Path("atlas"), sys.argv[1:])
    ranks = Ranks(config.learner.collective_timeout_s)
    engine = DeepSpeedEngine(torch.nn.Linear(4, 1), config.learner, config.model.dtype)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    try:
        with ranks.meeting():
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step(0.1)
    finally:
        print(time.monotonic() - began, flush=True)


if __name__ == "__main__":
    with exit_with_one_line("rank"):
        main()
