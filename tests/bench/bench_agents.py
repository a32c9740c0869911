"""Agents against the native loop, how exact their episodes are, and what kills do: python -m tests.bench.bench_agents

- `over_native_loop`: tokens sampled per CPU second of a rollout worker and its engine, whose episodes are those of
  docs/examples/remote.py in another process, over a worker with the search environment: the same policy and prompts, 64
  episodes in flight; the median ratio of ROUNDS alternating rounds. `over_native_loop_openai` is the same with
  docs/examples/agent.py in the worker: what the openai client takes is counted.
- `ids_exact_share`, `logp_max_diff`, `rows_per_episode`: EPISODES episodes on vLLM in float32. Of the sampled tokens of
  the trajectories, the share that the engine has sampled there; the largest difference between its log-probabilities
  and those of transformers, row by row; rows of an episode.
- `kills`, `lost`, `doubled`: a campaign of tests/system/chaos whose episodes are programs: agents, workers, learner,
  Redis and retriever are killed, workers stopped.

Into runs/bench/agents.json.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cusearch_async.config import load_config
from cusearch_async.lifecycle.placement import configure_process
from tests.agents.templates import chat_starter
from tests.bench import bench_rollout, figures
from tests.bench.bench_learner import ROOT, Side
from tests.conftest import free_port
from tests.system.chaos import campaign
from tests.system.chaos.scene import fresh_folder, tiny_model

OUTPUT = Path("runs/bench/agents.json")
ROUNDS = 5
IN_FLIGHT = 64
EPISODES = 64
KILLS = 60
KINDS = {"kill agent", "kill worker", "kill learner", "kill redis", "kill retriever", "pause worker"}
FUNCTION = "docs.examples.agent:answer"
HF = ("--environment.search.parser", "hf", "--environment.search.reasoning_parser", "hf")
AGENT = ("--environment.search.name", "agent", "--environment.search.agent", FUNCTION, *HF)
FOUND = ["Pinsk\nPinsk is a city in Belarus.", "Belarus\nIts capital is Minsk."]


def over_native_loop(model: Path, rounds: int = ROUNDS, in_flight: int = IN_FLIGHT) -> dict[str, Any]:
    os.environ["CUSEARCH_AGENTS_TOKEN"] = secrets.token_urlsafe()
    address = f"http://127.0.0.1:{free_port()}"
    chat = ("--model.path", str(model), "--environment.search.name", "agent")
    settings = {
        "native": ("--model.path", "atlas"),
        "remote": (*chat, "--environment.search.remote", address),
        "openai": ("--model.path", str(model), *AGENT),
    }
    sides = {name: Side(sys.executable, "rollout_case.py", "worker", ROOT) for name in settings}
    program = [sys.executable, "-m", "docs.examples.remote", address, str(in_flight)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}  # PYTHONSAFEPATH may be set here
    with subprocess.Popen(program, cwd=ROOT, env=env, stdout=subprocess.DEVNULL) as elsewhere:
        try:
            found = bench_rollout.measure(sides, rounds + 1, in_flight, settings_of=settings)
        finally:
            elsewhere.kill()
    rates = {name: bench_rollout.rates(spent) for name, spent in found.items()}
    ratios = {name: [one / other for one, other in zip(rates[name], rates["native"], strict=True)] for name in rates}
    return {
        "over_native_loop": statistics.median(ratios["remote"]),
        "over_native_loop_openai": statistics.median(ratios["openai"]),
        "tokens_per_cpu_s": {name: statistics.median(of_rounds) for name, of_rounds in rates.items()},
        "tokens": {name: [spent["tokens"] for spent in of_rounds] for name, of_rounds in found.items()},
    }


class Finding:
    """A retriever that finds the same for every query."""

    async def search(self, query: str, seed: int, question: Any, ticket: int) -> list[str]:
        return FOUND


def exactness(model: Path, count: int = EPISODES) -> dict[str, Any]:
    configure_process([])
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cusearch_async.agents.episode import AgentRunner
    from cusearch_async.data.questions import load_run_questions
    from cusearch_async.rollout.engine import Engine

    settings = ["--model.path", str(model), "--model.dtype", "float32", *AGENT]
    config = load_config([ROOT / "configs" / "atlas.toml"], settings)
    tokenizer, plain = (
        AutoTokenizer.from_pretrained(model),
        AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval(),
    )
    questions = load_run_questions(config).all[:count]

    async def run_all() -> tuple[list[Any], list[list[int]]]:
        engine = Engine.start(str(model), tokenizer, config)
        generate, sampled = engine.generate, []

        async def noting(*arguments: Any) -> Any:
            turn = await generate(*arguments)
            sampled.append([*arguments[0], *turn.token_ids])
            return turn

        engine.generate = noting  # type: ignore[method-assign]
        try:
            runner = AgentRunner(engine, config.environments(Finding()), tokenizer, config.episode, 0)
            running = (runner.run(question, ticket, 0, "w") for ticket, question in enumerate(questions))
            return list(await asyncio.gather(*running)), sampled
        finally:
            engine.close()

    trajectories, sampled = asyncio.run(run_all())
    texts = {tuple(ids) for ids in sampled}  # what the engine was given and has sampled after it
    exact = total = 0
    largest = 0.0
    rows = [row for trajectory in trajectories for row in trajectory.rows]
    for row in rows:
        ends = [*(np.flatnonzero(np.diff(row.sampled.astype(int)) == -1) + 1), len(row.token_ids)]
        before = 0
        for end in ends:
            own = int(row.sampled[before:end].sum())
            exact, total, before = exact + own * (tuple(row.token_ids[:end].tolist()) in texts), total + own, end
        ids = torch.tensor(row.token_ids[None].astype(np.int64))
        with torch.no_grad():
            log_p = torch.log_softmax(plain(ids).logits[0, :-1].double(), -1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        largest = max(largest, float(np.abs(log_p.numpy()[row.sampled[1:]] - row.logprobs).max()))
    return {
        "ids_exact_share": exact / total,
        "logp_max_diff": largest,
        "rows_per_episode": len(rows) / len(trajectories),
        "sampled_tokens": total,
    }


def kills(folder: Path, count: int = KILLS) -> dict[str, Any]:
    chosen = next(one for one in campaign.CAMPAIGNS if one.name == "agents")
    summary = campaign.run(chosen, folder / "agents", tiny_model(fresh_folder(folder / "model")), count, 1, KINDS)
    killed = sum(count for kind, count in summary["faults"].items() if kind.startswith("kill"))
    return {
        "kills": killed,
        "faults": dict(summary["faults"]),
        "trajectories_audited": summary["trajectories"],
        "lost": summary["lost"],
        "doubled": summary["trained_twice"],
        "beyond_bound": summary["beyond_bound"],
        "clean": campaign.is_clean(summary),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = chat_starter(folder / "chat")
        for part in (lambda: exactness(model), lambda: over_native_loop(model), lambda: kills(folder)):
            found = part()
            figures.add(arguments.out, found)
            for name, value in found.items():
                print(name, value)
    print(f"figures in {arguments.out}")


if __name__ == "__main__":
    main()
