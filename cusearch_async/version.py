"""The version of the running code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import cusearch_async


def commit() -> str | None:
    """Of the checkout that the code comes from, with a + after it if files were changed; None for an installed one."""
    checkout = Path(__file__).parents[1]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def full_version() -> str:
    """The version, and in a checkout its commit: 0.2.0.dev0+g3118a3f5a1b2, with .changed after it if files were
    changed."""
    found = commit()
    number = cusearch_async.__version__
    return f"{number}+g{found.replace('+', '.changed')}" if found else number
