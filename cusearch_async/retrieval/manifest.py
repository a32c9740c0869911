"""The manifest of an index in a folder: the corpus and the settings it was made from, and its length.

It is written after the index is in its place, and deleted before another index replaces it. So an index without a
manifest is not finished.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cusearch_async.errors import ConfigError
from cusearch_async.files import write_file

MANIFEST = "manifest.json"
REMEDY = "build it again with `cusearch index CONFIG`"


def seal(index: Path, dependencies: Mapping[str, Any]) -> None:
    """Write the manifest next to an index, a file or a folder that is in its place. `dependencies`: what it was made
    from."""
    write_json(index.with_name(MANIFEST), {**dependencies, "bytes": _size(index)})


def break_seal(index: Path) -> None:
    """Delete the manifest, because another index will replace this one."""
    index.with_name(MANIFEST).unlink(missing_ok=True)


def check(index: Path, dependencies: Mapping[str, Any], missing: str) -> dict[str, Any]:
    """The manifest of an index that has these dependencies and its length; `missing`: what there is without one.

    Not covered: bytes that have changed within an index of the right length.
    Raises: ConfigError that names the folder, the problem and what to do."""
    path = index.with_name(MANIFEST)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        remedy = "build it with `cusearch index CONFIG`"
        raise ConfigError(f"retriever.index {index.parent} holds {missing}; {remedy}") from error
    except (OSError, ValueError) as error:
        raise damaged(path, str(error)) from error
    if not isinstance(manifest, dict):
        raise damaged(path, "it is not a JSON object")
    if found := differences(manifest, dependencies):
        made = f"was made from another corpus than retriever.corpus, or with other settings ({found})"
        raise ConfigError(f"retriever.index {index.parent} {made}; fix the config, or {REMEDY}")
    try:
        size = _size(index)
    except OSError as error:
        raise damaged(index, str(error)) from error
    if size != manifest.get("bytes"):
        raise damaged(index, f"it has {size} bytes instead of {manifest.get('bytes')}")
    return manifest


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """As text; empty without any."""
    return "; ".join(f"{key} {then.get(key)!r}, now {now[key]!r}" for key in now if then.get(key) != now[key])


def damaged(index: Path, problem: str) -> ConfigError:
    return ConfigError(f"retriever.index {index.parent} is damaged ({index.name}: {problem}); delete it and {REMEDY}")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_file(path, json.dumps(values, indent=1).encode())


def _size(index: Path) -> int:
    """Of a file, or of all files in a folder. Raises: OSError."""
    if index.is_dir():
        return sum(path.stat().st_size for path in index.rglob("*") if path.is_file())
    return index.stat().st_size
