"""Chromium without a window."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.conftest import SLOW

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def in_browser(url: str, folder: Path, size: str) -> str:
    """The document after its script has run. Raises: AssertionError for what the console says."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += ["--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}"]
    options += [f"--window-size={size}", "--virtual-time-budget=2000", "--enable-logging=stderr", "--dump-dom"]
    found = subprocess.run(
        [str(CHROMIUM), *options, url], capture_output=True, text=True, timeout=120 * SLOW, check=True
    )
    said = [line for line in found.stderr.splitlines() if "CONSOLE" in line]
    assert not said, "\n".join(said)
    return found.stdout
