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
    return sum(_known_by(passage) in shown for passage in evidence) / len(evidence)


def _known_by(passage: str) -> str:
    title, _, rest = passage.strip().partition("\n")
    return " ".join((rest or title).split())[:_COMPARED].rstrip()
