"""Where plots are drawn: matplotlib, without a screen."""

from __future__ import annotations

from typing import Any

from cusearch_async.errors import packages_of


def pyplot() -> Any:
    """matplotlib.pyplot, which takes a second to load: call it where something is drawn. Raises: MissingExtra."""
    with packages_of("study"):
        import matplotlib as mpl  # noqa: PLC0415

        mpl.use("Agg")
        from matplotlib import pyplot as plt  # noqa: PLC0415

    return plt
