"""A run under 1,800 faults, and an audit of every pool: python -m tests.system.chaos [--seed S] [--faults N]

Real Redis, retriever, weight files and learner (DeepSpeed); the workers are real but for an engine that costs nothing,
in one campaign also that. Each campaign draws its faults from its seed; what it did is in OUT/<campaign>/faults.jsonl,
what every process said in logs/. OUT/summary.json has the figures. Exit status 1 if anything was lost, trained twice,
beyond the bound, in a wrong pool, miscounted, left over or stuck; everything is kept."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.object_stores import SERVER
from tests.system.chaos import checker
from tests.system.chaos.campaign import CAMPAIGNS, is_clean, run
from tests.system.chaos.faults import KINDS
from tests.system.chaos.scene import fresh_folder, tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=1800, help="in all campaigns together")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    names = [campaign.name for campaign in CAMPAIGNS]
    parser.add_argument("--campaigns", nargs="*", default=names, choices=names)
    parser.add_argument("--kinds", nargs="*", default=[], choices=[kind.name for kind in KINDS], metavar="KIND")
    arguments = parser.parse_args()
    if "object" in arguments.campaigns and not SERVER.exists():
        parser.error(f"the campaign object needs {SERVER}: make setup-sdks")
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # every process is then ended
    out = fresh_folder(arguments.out)
    model = tiny_model(out / "model")
    chosen = [campaign for campaign in CAMPAIGNS if campaign.name in arguments.campaigns]
    total = sum(campaign.share for campaign in chosen)
    began, summaries = time.monotonic(), []
    for campaign in chosen:
        count = round(arguments.faults * campaign.share / total)
        seed = arguments.seed * 100 + CAMPAIGNS.index(campaign)
        summaries.append(run(campaign, out / campaign.name, model, count, seed, set(arguments.kinds)))
        show(summaries[-1])
    summary = together(summaries, arguments.seed, time.monotonic() - began)
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    print(f"{sum(summary['faults'].values())} faults in {summary['seconds']} s, seed {arguments.seed}: "
          f"{'clean' if summary['clean'] else 'NOT CLEAN'}; {out / 'summary.json'}")  # fmt: skip
    sys.exit(0 if summary["clean"] else 1)


def together(summaries: list[dict[str, Any]], seed: int, seconds: float) -> dict[str, Any]:
    """One summary of all campaigns."""
    names = (
        *checker.WRONGS,
        "raw_ends",
        "workers_ended",
        "incomplete_groups",
        "counted_lost",
        "trajectories",
        "steps",
        "recoveries",
    )
    counted = ("faults", "not_run", "restarts")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        **{name: dict(sum((Counter(s[name]) for s in summaries), Counter())) for name in counted},
        **{name: sum(s[name] for s in summaries) for name in names},
        "ledger_closes": all(s["ledger_closes"] for s in summaries),
        "files_whole": all(s["files_whole"] for s in summaries),
        "staleness_max": max(s["staleness_max"] for s in summaries),
        "stuck": [f"{s['campaign']}: {s['stuck']}" for s in summaries if s["stuck"]],
        "clean": all(map(is_clean, summaries)),
        "seed": seed,
        "seconds": round(seconds),
        "commit": commit,
        "campaigns": summaries,
    }


def show(summary: dict[str, Any]) -> None:
    print(f"\n{summary['campaign']}: {sum(summary['faults'].values())} faults, {summary['steps']} steps")
    for name in (
        *checker.WRONGS,
        "ledger_closes",
        "files_whole",
        "staleness_max",
        "raw_ends",
        "workers_ended",
        "stuck",
        "not_run",
    ):
        print(f"  {name:22} {summary[name]}")
    for told in summary["wrong"]:
        print(f"  WRONG {told[:300]}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
