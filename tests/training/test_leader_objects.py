"""A learner whose checkpoints go to an object store: what others elsewhere know of its start and of its end."""

from __future__ import annotations

import asyncio

import pytest

from cusearch_async.errors import WriteFailed
from cusearch_async.objects import Objects
from cusearch_async.run.history import read_stop
from tests.conftest import wait_until
from tests.object_stores import s3, store_url  # noqa: F401  (fixtures)
from tests.training.test_checkpoint_objects import OBJECTS, objects, putting_without
from tests.training.test_takeover import Scene, go_on

__all__ = ["objects"]


def test_a_learner_is_alive_for_others_while_it_uploads(objects, atlas_config, tmp_path, monkeypatch):
    """All of the checkpoint that it resumes, in a fork: a second learner took the run over unwarned meanwhile."""
    s, put_there = Scene(atlas_config, tmp_path / "here", *OBJECTS), Objects.put

    def once_it_is_known(own, path, file):
        if path == "starts/0001.json":
            wait_until(lambda: asyncio.run(s.another().learner()) is not None, 10)
        put_there(own, path, file)

    monkeypatch.setattr(Objects, "put", once_it_is_known)
    s.lead()
    assert "starts/0001.json" in objects.paths()


def test_a_learner_that_cannot_tell_its_start_leaves_why_it_ended(objects, atlas_config, tmp_path):
    s = Scene(atlas_config, tmp_path / "here", *OBJECTS)
    with pytest.raises(WriteFailed, match="an outage"), putting_without(""):
        s.lead()
    stop = read_stop(s.config.folder, 1)
    assert stop is not None
    assert "an outage" in stop.outcome


def test_a_learner_that_could_not_tell_its_start_tells_no_stop_either(objects, atlas_config, tmp_path):
    """A store with starts alone would begin the run anew."""
    s = Scene(atlas_config, tmp_path / "here")
    s.lead()
    go_on(s, *OBJECTS, "--run.steps", "3", atlas_config=atlas_config)
    with pytest.raises(WriteFailed, match="an outage"), putting_without("checkpoints/"):
        s.lead()
    assert objects.paths() == []


def test_how_a_learner_has_ended_is_known_elsewhere(objects, atlas_config, tmp_path):
    s = Scene(atlas_config, tmp_path / "here", *OBJECTS)
    s.lead()
    assert "starts/0001.stop" in objects.paths()
