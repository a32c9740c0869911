"""Builds of an index, some of which are interrupted."""

from __future__ import annotations

import pytest

from cusearch_async.retrieval.dense import build


def ids(found):
    return [[passage["id"] for passage, _ in result] for result in found]


def quiet(done, total):
    pass


class Killed(BaseException):
    pass


def interrupt(passages, folder, settings, after, fingerprint="print"):
    """A build that ends when `after` passages have been encoded."""

    def die(done, total):
        if done >= after:
            raise Killed

    with pytest.raises(Killed):
        build(passages, folder, settings, fingerprint, die)
