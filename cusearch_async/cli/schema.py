"""`cusearch schema`: prints the JSON schema of a config, so that editors can complete and check it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from cusearch_async.config import Config


def add(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)


def run(_: argparse.Namespace, __: list[str]) -> None:
    print(json.dumps(schema(), indent=1, ensure_ascii=False))


def schema() -> dict[str, Any]:
    """Draft 2020-12. It has keys, types and ranges. Rules between several keys are checked only by `cusearch check`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
