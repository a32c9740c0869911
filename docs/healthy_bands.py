"""cusearch_async/dashboard/healthy.json: the figures of the study's runs with the settings of its world, by method."""

from __future__ import annotations

import json

import pandas as pd

from tests.planted_troubles import STUDY

METRICS = (
    "reward/all",
    "depth/mean",
    "groups/zero_variance_share",
    "train/entropy",
    "train/grad_norm",
    "off_policy/ess",
    "off_policy/mismatch_kl",
)
LOW, HIGH = 0.1, 0.9
"""Quantiles over the runs of a method."""
USUAL = {
    "pool.max_staleness": 2,
    "method.singleton": "raw",
    "method.phase_reserve": 0.0,
    "episode.s_max": 5,
    "data.source": "atlas-hard",
}


def bands() -> str:
    """Method -> metric -> low and high [step], as JSON."""
    runs, steps = pd.read_parquet(STUDY.with_name("runs.parquet")), pd.read_parquet(STUDY)
    usual = runs[(runs[list(USUAL)] == pd.Series(USUAL)).all(axis=1)]
    found = {}
    for method, of_method in usual.groupby("method.name"):
        by_step = steps[steps["run"].isin(of_method["run"])].groupby("step")[list(METRICS)]
        low, high = (by_step.quantile(share) for share in (LOW, HIGH))
        found[method] = {metric: {"low": _rounded(low[metric]), "high": _rounded(high[metric])} for metric in METRICS}
    return json.dumps(found, separators=(",", ":")) + "\n"


def _rounded(values: pd.Series) -> list[float]:
    return [float(f"{value:.3g}") for value in values]
