"""Idioms that stop readers, each with the plain words for it, are in no text of the project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READ = (
    *("README.md", "CONTRIBUTING.md", "Makefile", "docs/*.md", "docs/examples/**/*"),
    *("cusearch_async/**/*", "workers/*"),
)
FIXED = ("cusearch_async/study/report.py",)
"""Writes the report of a study that is registered: its text stays."""
PLAIN = {
    r"\b(go|goes|going|went|gone) on\b": "continue, resume",
    r"(?<!line )\bof (its|their|one's|his) own\b(?! \w)": "separate, own, custom",
    r"\btorn\b": "incomplete",
    r"\b(play|plays|played|playing|players?)\b": "roll out, generate, run",
    r"\b(look|looks|looked) (at it )?(in|into) (it|the run)\b": "monitor, inspect",
    r"\bwho(ever)? (has|have) (it|them) open\b": "the process that",
    r"\bat most any number\b": "unlimited",
}


@pytest.mark.parametrize("idiom", PLAIN)
def test_no_text_has_an_idiom_that_has_a_plain_word(idiom):
    found = []
    for path in sorted({path for pattern in READ for path in ROOT.glob(pattern)}):
        is_text = path.suffix in (".py", ".lua", ".md", ".toml", ".yaml", ".sh") or path.name == "Makefile"
        if is_text and str(path.relative_to(ROOT)) not in FIXED:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if re.search(idiom, line, re.IGNORECASE):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, f"say: {PLAIN[idiom]}\n" + "\n".join(found)
