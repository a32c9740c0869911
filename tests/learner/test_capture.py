"""What all ranks write of a checkpoint."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from cusearch_async.config import as_toml, load_config
from cusearch_async.errors import WriteFailed
from cusearch_async.learner.divided_state import file_of
from tests.conftest import wait_until

pytestmark = pytest.mark.system  # imports DeepSpeed


def captured(own_error: Exception | None, others: list[str], elsewhere: tuple[int, ...] = ()):
    """The function that writes, and what it waited for."""
    from cusearch_async.learner.learner import DeepSpeedLearner

    waited = []

    def write():
        if own_error:
            raise own_error

    ranks = SimpleNamespace(wait_for_answers=lambda name: waited.append(name) or others)
    engine = SimpleNamespace(without_part=lambda folder: elsewhere)
    parts = {"_tell": lambda command: None, "_capture": lambda folder: write, "_captures": 0, "_ranks": ranks}
    parts["_engine"] = engine
    return DeepSpeedLearner.capture(SimpleNamespace(**parts), "folder"), waited


def test_another_ranks_failure_is_named():
    write, _ = captured(None, ["", "rank 1 cannot write its part: No space left on device"])
    with pytest.raises(WriteFailed, match=r"^rank 1 cannot write its part: No space"):
        write()


def test_a_rank_that_cannot_write_waits_for_the_others():
    """They write into the folder that is deleted then: before, one could make it again."""
    write, waited = captured(OSError("No space left on device"), ["rank 1 cannot write its part"])
    with pytest.raises(OSError, match=r"^No space"):
        write()
    assert waited == ["written/1"]


def test_a_rank_that_wrote_into_another_folder_is_named():
    """One of the same name on its node: such a checkpoint counted, and could not be loaded."""
    write, _ = captured(None, ["", ""], elsewhere=(1, 2))
    with pytest.raises(WriteFailed, match=r"^rank 1, 2 has written .* elsewhere than in folder: run\.folder must"):
        write()


@pytest.mark.parametrize(("stage", "absent"), [(0, []), (1, [1])])
def test_a_part_that_is_not_there_is_noticed(tmp_path, stage, absent):
    """At stage 0 rank 0 writes for all."""
    from cusearch_async.learner.deepspeed_engine import DeepSpeedEngine

    (tmp_path / "deepspeed").mkdir()
    for rank in (0, 2):
        file_of(tmp_path / "deepspeed", rank).touch()
    assert DeepSpeedEngine.without_part(SimpleNamespace(_stage=stage, _ranks=3), tmp_path) == absent


def test_what_another_rank_has_written_leaves_its_memory():
    """A copy of its part of the optimizer stayed until the next checkpoint, beside which it was copied again."""
    from cusearch_async.learner.learner import Command, DeepSpeedLearner

    class Write:
        def __call__(self):
            written.set()

    written, held, commands = threading.Event(), [], iter(["capture", "stop"])

    def listen():
        if held:
            written.wait(20)
            wait_until(lambda: held[0]() is None, 20)
        return msgspec.msgpack.encode(Command(next(commands), folder="folder"))

    def capture(folder):
        write = Write()
        held.append(weakref.ref(write))
        return write

    learner = DeepSpeedLearner.__new__(DeepSpeedLearner)
    learner._captures, learner._capture = 0, capture
    learner._ranks = SimpleNamespace(listen=listen, rank=1, answer=lambda *_: None)
    learner._engine = SimpleNamespace(reload=None)
    learner.follow()
    assert held[0]() is None


def test_another_rank_trains_with_the_settings_of_rank_0(monkeypatch, atlas_config):
    """Those of its node were used, which may be an older file, or without the overrides."""
    from cusearch_async.processes import learner as process

    made = []
    config = load_config(atlas_config, ["--learner.lr", "1e-3", "--run.folder", "the/one"])
    told = iter([as_toml(config).encode(), b"the/one/checkpoint"])
    ranks = SimpleNamespace(listen=lambda: next(told), close=lambda: None)
    learner = SimpleNamespace(load=made.append, follow=lambda: None)
    monkeypatch.setattr(process, "DeepSpeedLearner", lambda config, ranks: made.append(config) or learner)
    monkeypatch.setattr(process, "die_with_parent", lambda number: None)
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    process.follow(ranks)
    assert made == [config, Path("the/one/checkpoint")]
