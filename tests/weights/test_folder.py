"""The weight store: versions are complete or absent, and checked tensor by tensor."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cusearch_async.errors import WeightsUnavailable, WriteFailed
from cusearch_async.weights import folder as weights
from cusearch_async.weights.folder import WeightStore
from cusearch_async.weights.interface import ADAPTER_CONFIG, ADAPTER_TENSORS, MANIFEST, TENSORS, Canary
from cusearch_async.weights.tensor_file import write_tensors

CANARY = Canary([1, 2, 3], [-0.5, -1.5], 1e-3)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(3, 4, generator=generator),
        "b.weight": torch.randn(5, generator=generator).to(torch.bfloat16),
        "c.scale": torch.tensor(2.0),
    }


def test_a_published_version_is_verified_with_its_canary(tmp_path):
    store = WeightStore(tmp_path)
    name = store.publish(12, 3, tensors(), CANARY)
    manifest = store.verify(name)
    assert name == "v000012-e3"
    assert (manifest.version, manifest.epoch, manifest.canary) == (12, 3, CANARY)
    assert manifest.tensors["b.weight"].shape == [5]


ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def test_an_adapter_is_published_as_peft_writes_one(tmp_path):
    store = WeightStore(tmp_path)
    name = store.publish(12, 3, tensors(), CANARY, adapter=ADAPTER)
    files = sorted(path.name for path in (tmp_path / name).iterdir())
    assert files == [ADAPTER_CONFIG, ADAPTER_TENSORS, MANIFEST]
    assert json.loads((tmp_path / name / ADAPTER_CONFIG).read_text()) == ADAPTER
    manifest = store.verify(name)
    assert (manifest.adapter, manifest.file) == (ADAPTER, ADAPTER_TENSORS)
    assert manifest.tensors.keys() == tensors().keys()
    whole = store.verify(store.publish(13, 3, tensors(), CANARY))
    assert (whole.adapter, whole.file) == (None, TENSORS)


@pytest.mark.parametrize("content", ['{"r": 8}', "{", ""])
def test_an_adapter_with_another_config_than_its_manifest_says_is_refused(tmp_path, content):
    store = WeightStore(tmp_path)
    name = store.publish(0, 1, tensors(), CANARY, adapter=ADAPTER)
    (tmp_path / name / ADAPTER_CONFIG).write_text(content)
    with pytest.raises(WeightsUnavailable, match="v000000-e1"):
        store.verify(name)
    (tmp_path / name / ADAPTER_CONFIG).unlink()
    with pytest.raises(WeightsUnavailable, match="v000000-e1 is missing or damaged"):
        store.verify(name)


def test_tensors_may_change_as_soon_as_they_are_copied_and_after_a_failure(tmp_path, monkeypatch):
    store, held = WeightStore(tmp_path), tensors()

    def change():
        for tensor in held.values():
            tensor.fill_(7)

    name = store.publish(1, 1, held, CANARY, copied=change)
    with safe_open(store.directory(name) / TENSORS, framework="pt") as file:
        assert {key: file.get_tensor(key).tolist() for key in file.keys()} == {  # noqa: SIM118  (not a dict)
            key: tensor.tolist() for key, tensor in tensors().items()
        }
    store.verify(name)
    monkeypatch.setattr(weights, "write_tensors", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    told = []
    with pytest.raises(WriteFailed, match="broken"):
        store.publish(2, 1, held, CANARY, copied=lambda: told.append("copied"))
    assert told == ["copied"], "an update that waits for the copy must not wait for ever"
    (tmp_path / "file").touch()
    with pytest.raises(WriteFailed):
        WeightStore(tmp_path / "file" / "weights").publish(2, 1, held, CANARY, copied=lambda: told.append("copied"))
    assert told == ["copied"] * 2, "nor where not even a folder can be made"


def test_old_versions_are_removed_but_not_the_newest(tmp_path):
    store = WeightStore(tmp_path)
    names = [store.publish(version, 1, tensors(version), CANARY) for version in range(5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names[-3:]


async def test_versions_that_are_to_be_scored_are_kept_besides_the_newest(tmp_path):
    store = WeightStore(tmp_path, keeps=lambda version: version % 3 == 0)
    names = [store.publish(version, 1, tensors(version), CANARY) for version in range(8)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [names[v] for v in (0, 3, 5, 6, 7)]
    assert (await store.newest_of(3), await store.newest_of(4)) == (names[3], None)
    later = store.publish(3, 2, tensors(3), CANARY)
    assert await store.newest_of(3) == later
    assert not (tmp_path / names[3]).exists(), "what no evaluator opens: each restart of a learner left more"
    assert (tmp_path / names[0]).exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "v000000-e1 is missing or damaged"),
        (lambda folder: cut(folder / TENSORS), "incomplete"),
        (lambda folder: flip(folder / TENSORS), "tensor only does not match its checksum"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "v000000-e1 is missing or damaged"),
    ],
)
def test_a_damaged_version_is_refused_by_name(tmp_path, damage, message):
    store = WeightStore(tmp_path)
    damage(tmp_path / store.publish(0, 1, {"only": torch.zeros(64)}, CANARY))
    with pytest.raises(WeightsUnavailable, match=message):
        store.verify("v000000-e1")


@pytest.mark.parametrize("other", [{"b": torch.ones(2)}, {"a": torch.ones(2, 1)}, {"a": torch.ones(2).int()}])
def test_other_tensors_than_the_manifest_names_are_refused(tmp_path, other):
    store = WeightStore(tmp_path)
    name = store.publish(0, 1, {"a": torch.ones(2)}, CANARY)
    write_tensors(tmp_path / name / TENSORS, other)
    with pytest.raises(WeightsUnavailable, match=r"name different parameters|does not match its checksum"):
        store.verify(name)


def test_an_interrupted_publication_leaves_no_version(tmp_path):
    store = WeightStore(tmp_path)
    (tmp_path / ".unfinished-v000000-e1").mkdir(parents=True)
    store.publish(0, 1, tensors(), CANARY)
    assert [path.name for path in tmp_path.iterdir()] == ["v000000-e1"]


def test_a_learner_that_was_replaced_deletes_no_version_of_its_successor(tmp_path):
    older, newer = WeightStore(tmp_path), WeightStore(tmp_path)
    for version in (2, 3, 4, 5):
        newer.publish(version, 2, tensors(), CANARY)
    for version in (6, 7, 8, 9):
        older.publish(version, 1, tensors(), CANARY)
    kept = [*(f"v{version:06d}-e2" for version in (3, 4, 5)), *(f"v{version:06d}-e1" for version in (7, 8, 9))]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_what_earlier_learners_left_half_done_is_cleared_at_the_start(tmp_path):
    store = WeightStore(tmp_path)
    for name in (".unfinished-v000002-e1", "v000001-e1", ".unfinished-v000002-e4", "notes"):
        (tmp_path / name).mkdir()
    store.publish(3, 1, tensors(), CANARY)
    assert store.highest_epoch() == 4
    store.begin(4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".unfinished-v000002-e4", "notes", "v000003-e1"]


def test_a_full_disk_is_one_line_and_its_space_is_free_again(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WriteFailed, match=r"^cannot write .*/\.unfinished-v000003-e1: .*No space left on device"):
        WeightStore(tmp_path).publish(3, 1, tensors(), CANARY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../elsewhere",
        "v000001-e1/../../elsewhere",
        "/etc",
        "v1-e1",
        "v000001",
        "v000001-e1\n",
        "v000001-e1-../x",
    ],
)
def test_a_name_that_is_no_versions_is_refused_before_anything_is_read(tmp_path, name):
    store = WeightStore(tmp_path / "store")
    WeightStore(tmp_path).publish(1, 1, tensors(), CANARY)
    (tmp_path / "v000001-e1").rename(tmp_path / "elsewhere")
    with pytest.raises(WeightsUnavailable, match="is not the name of a weight version"):
        store.verify(name)


def test_a_version_that_is_a_link_out_of_the_store_is_refused(tmp_path):
    WeightStore(tmp_path / "other").publish(1, 1, tensors(), CANARY)
    store = WeightStore(tmp_path / "store")
    store.folder.mkdir()
    (store.folder / "v000001-e1").symlink_to(tmp_path / "other" / "v000001-e1")
    with pytest.raises(WeightsUnavailable, match="points outside the weight store"):
        store.verify("v000001-e1")


def test_a_store_may_be_a_link_itself(tmp_path):
    name = WeightStore(tmp_path / "disk").publish(1, 1, tensors(), CANARY)
    (tmp_path / "weights").symlink_to(tmp_path / "disk")
    assert WeightStore(tmp_path / "weights").verify(name).version == 1


def test_a_version_under_the_name_of_another_is_refused(tmp_path):
    store = WeightStore(tmp_path)
    (tmp_path / store.publish(3, 2, tensors(), CANARY)).rename(tmp_path / "v000004-e2")
    with pytest.raises(WeightsUnavailable, match="has the manifest of v000003-e2"):
        store.verify("v000004-e2")


def test_a_version_that_is_published_often_keeps_its_newest_directories(tmp_path):
    store = WeightStore(tmp_path)
    names = [store.publish(3, 1, tensors(), CANARY) for _ in range(11)]
    assert names[:2] == ["v000003-e1", "v000003-e1-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[-3:])
