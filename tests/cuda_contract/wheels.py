"""The CUDA wheels of vLLM: their Python sources, fetched once from the package index."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

FOLDER = Path(os.environ.get("CUSEARCH_WHEELS", "runs/wheels"))
"""Where wheels stay: some 330 MB each. What is unpacked of them takes 60 MB."""
COMPILED = ".abi3.so"


def sources(version: str) -> Path:
    """A folder with the package `vllm` of this version: its Python files, and empty ones in place of what is
    compiled."""
    folder = FOLDER / f"vllm-{version}"
    if not (folder / "vllm" / "__init__.py").exists():
        unpack(fetch(version), folder)
    return folder.resolve()


def fetch(version: str) -> Path:
    """The wheel, downloaded if it is not there."""
    if not (found := list(FOLDER.glob(f"vllm-{version}-*.whl"))):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        subprocess.run([*command, "--dest", str(FOLDER), f"vllm=={version}"], check=True)
        found = list(FOLDER.glob(f"vllm-{version}-*.whl"))
    return found[0]


def unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist(), key=lambda name: name == "vllm/__init__.py"):  # last: then all is there
            if name.endswith(COMPILED):
                empty = folder / (name.removesuffix(COMPILED) + ".py")
                empty.parent.mkdir(parents=True, exist_ok=True)
                empty.touch()
            elif name.endswith(".py") or ".dist-info/" in name:
                archive.extract(name, folder)
