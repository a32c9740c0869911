"""How much of a question's evidence an episode was shown."""

from __future__ import annotations

from collections.abc import Sequence

from cusearch_async.types import Segment

_COMPARED = 100
"""Characters at the beginning of a passage, after its title, by which it is known; a long one is shown cut."""


def share_shown(evidence: Sequence[str] | None, segments: Sequence[Segment]) -> float | None:
    """Share of the `evidence`, passages, whose text is in what the policy was shown; None without evidence.

    White space and the title make no difference: a document template shows both otherwise."""
    if not evidence:
        return None
    shown = " ".join(" ".join(segment.text.split()) for segment in segments if segment.author != "model")
    bodies = (with_and_without_title(passage)[1] for passage in evidence)
    return sum(body[:_COMPARED].rstrip() in shown for body in bodies) / len(evidence)


def with_and_without_title(text: str) -> tuple[str, str]:
    """A text in one line, and without its first one; twice the same where it has only one."""
    whole, rest = (" ".join(part.split()) for part in (text, text.strip().partition("\n")[2]))
    return whole, rest or whole
