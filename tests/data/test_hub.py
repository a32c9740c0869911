"""What the Hugging Face Hub refuses, or cannot be asked, is told with what it says."""

from __future__ import annotations

import re

import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from cusearch_async.data.questions import load_questions
from cusearch_async.errors import ConfigError


class Broken(Exception):
    """As the Hub's HTTP library raises when a connection breaks."""


@pytest.mark.parametrize("kind", [OSError, Broken])
def test_a_hub_that_cannot_be_reached_is_named(monkeypatch, kind):
    def fail(*_, **__):
        raise kind("no route to host\nand more")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(ConfigError, match=r"data\.source: cannot get hf:a/b/c\.jsonl: no route to host$"):
        load_questions(["hf:a/b/c.jsonl"])


class Refused(RepositoryNotFoundError):
    """A gated, private or misspelt repository."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)


LOG_IN = "; log in with `hf auth login`, or set HF_TOKEN"


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (
            Refused,
            "Cannot access gated repo for url x.\nAccess to a/b is restricted.\nMore.",
            f"is restricted.{LOG_IN}",
        ),
        (
            Refused,
            "Repository Not Found for url: x.\nPlease make sure.",
            f"Not Found for url: x. Please make sure.{LOG_IN}",
        ),
        (Broken, "Entry Not Found for url: x.", "Entry Not Found for url: x."),
    ],
)
def test_what_the_hub_refuses_is_named_and_not_its_status_alone(monkeypatch, kind, text, said):
    def refuse(*_, **__):
        raise kind(f"401 Client Error. (Request ID: Root=1-abc)\n\n{text}")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(ConfigError, match=rf"data\.source: cannot get hf:a/b/c\.jsonl: .*{re.escape(said)}$"):
        load_questions(["hf:a/b/c.jsonl"])
