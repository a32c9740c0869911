"""The weight store: versions are complete or absent, and checked tensor by tensor."""

from __future__ import annotations

import pytest
import torch
from safetensors import SafetensorError

from cusearch_async.errors import WeightsUnavailable, WriteFailed
from cusearch_async.transport import weights
from cusearch_async.transport.weights import MANIFEST, TENSORS, Canary, WeightStore

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


def test_old_versions_are_removed_but_not_the_newest(tmp_path):
    store = WeightStore(tmp_path, keep=2)
    names = [store.publish(version, 1, tensors(version), CANARY) for version in range(4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names[-2:]


def test_a_missing_version_is_named(tmp_path):
    with pytest.raises(WeightsUnavailable, match="v000001-e1"):
        WeightStore(tmp_path).verify("v000001-e1")


def test_a_torn_tensor_file_is_refused(tmp_path):
    store = WeightStore(tmp_path)
    path = tmp_path / store.publish(0, 1, tensors(), CANARY) / TENSORS
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(WeightsUnavailable, match="torn"):
        store.verify("v000000-e1")


def test_one_changed_byte_names_its_tensor(tmp_path):
    store = WeightStore(tmp_path)
    path = tmp_path / store.publish(0, 1, {"only": torch.zeros(64)}, CANARY) / TENSORS
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightsUnavailable, match="tensor only"):
        store.verify("v000000-e1")


def test_a_manifest_that_is_no_json_is_refused(tmp_path):
    store = WeightStore(tmp_path)
    (tmp_path / store.publish(0, 1, tensors(), CANARY) / MANIFEST).write_text("{")
    with pytest.raises(WeightsUnavailable):
        store.verify("v000000-e1")


def test_an_interrupted_publication_leaves_no_version(tmp_path):
    store = WeightStore(tmp_path)
    (tmp_path / ".unfinished-v000000-e1").mkdir(parents=True)
    store.publish(0, 1, tensors(), CANARY)
    assert [path.name for path in tmp_path.iterdir()] == ["v000000-e1"]


def test_a_learner_that_was_replaced_deletes_no_version_of_its_successor(tmp_path):
    older, newer = WeightStore(tmp_path, keep=2), WeightStore(tmp_path, keep=2)
    for version in (3, 4, 5):
        newer.publish(version, 2, tensors(), CANARY)
    for version in (6, 7, 8):
        older.publish(version, 1, tensors(), CANARY)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000004-e2", "v000005-e2", "v000007-e1", "v000008-e1"]


def test_what_earlier_learners_left_half_done_is_cleared_at_the_start(tmp_path):
    store = WeightStore(tmp_path)
    for name in (".unfinished-v000002-e1", "v000001-e1", ".unfinished-v000002-e4", "notes"):
        (tmp_path / name).mkdir()
    store.publish(3, 1, tensors(), CANARY)
    assert store.highest_epoch() == 4
    store.begin(4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".unfinished-v000002-e4", "notes", "v000003-e1"]


def test_a_full_disk_is_one_line_and_its_space_is_free_again(tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(weights, "save_file", full)
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
    with pytest.raises(WeightsUnavailable, match="leads out of the weight store"):
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
    store = WeightStore(tmp_path, keep=2)
    names = [store.publish(3, 1, tensors(), CANARY) for _ in range(11)]
    assert names[:2] == ["v000003-e1", "v000003-e1-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[-2:])
