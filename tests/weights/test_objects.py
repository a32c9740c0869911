"""Weights in an object store, without an engine: a folder always, and moto's S3 where `make setup-sdks` was run."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from cusearch_async import objects as module
from cusearch_async.config import Config, load_config, shipped_configs
from cusearch_async.errors import ConfigError, MissingExtra, WeightsUnavailable, WriteFailed
from cusearch_async.objects import Objects, reason_of
from cusearch_async.run import folder as run_folder
from cusearch_async.weights import objects as transport_module
from cusearch_async.weights.interface import ADAPTER_CONFIG, ADAPTER_TENSORS, MANIFEST, TENSORS
from cusearch_async.weights.objects import ObjectCopies, ObjectStore, ObjectTransport, open_objects, versions_in
from tests.object_stores import SERVER, noted_calls, s3, s3_environment, store_url  # noqa: F401  (fixtures)
from tests.weights.test_http import ADAPTER, CANARY, same, tensors


class Site:
    """A learner's machine, and others, which share nothing but an object store."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.store = self.learner("learner")

    def learner(self, host: str) -> ObjectStore:
        return ObjectStore(self.folder / host / "weights", open_objects(self.url))

    def host(self, name: str = "worker") -> ObjectCopies:
        return ObjectCopies(open_objects(self.url), self.folder / name / "downloaded")

    def publish(self, version: int, epoch: int = 1) -> str:
        return self.store.publish(version, epoch, tensors(version), CANARY)

    def files(self) -> dict[str, set[str]]:
        return versions_in(self.host()._objects)

    def write(self, name: str, file: str, content: bytes) -> None:
        objects = self.host()._objects
        objects._obstore.put(objects._store, f"{name}/{file}", content)


@pytest.fixture
def site(tmp_path: Path, store_url: str) -> Site:  # noqa: F811
    return Site(tmp_path, store_url)


async def test_every_version_comes_bit_for_bit_with_its_manifest(site, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 1 << 20)  # the file has twelve of these, more than are asked for at once
    for version in range(3):
        name = site.publish(version)
        opened = await site.host().open(name)
        assert (opened.name, opened.manifest) == (name, site.store.verify(name))
        assert same(opened, tensors(version))
        assert opened.directory.is_relative_to(site.folder / "worker")
    assert await site.host().names() == site.store.names()
    assert await site.host().newest_of(1) == site.store.names()[1]
    assert await site.host().newest_of(7) is None


async def test_an_adapter_comes_with_the_config_that_vllm_reads(site):
    name = site.store.publish(1, 1, tensors(), CANARY, adapter=ADAPTER)
    opened = await site.host().open(name)
    assert same(opened, tensors())
    assert {path.name for path in opened.directory.iterdir()} == {ADAPTER_TENSORS, ADAPTER_CONFIG, MANIFEST}


async def test_processes_of_one_machine_fetch_a_version_once(site, monkeypatch):
    name, fetched, fetch = site.publish(1), [], ObjectCopies.receive

    async def counted(own, name, file, *more):
        fetched.append(file)
        await fetch(own, name, file, *more)

    monkeypatch.setattr(ObjectCopies, "receive", counted)
    one, other = await asyncio.gather(site.host().open(name), site.host().open(name))
    assert one == other
    assert sorted(fetched) == sorted([MANIFEST, TENSORS, MANIFEST]), "the second looks whether it is still the same"


def test_as_many_versions_stay_as_in_the_folder_and_no_later_learners_goes(site):
    names = [site.publish(version) for version in range(4)]
    assert sorted(site.files()) == sorted(names[1:]) == sorted(site.store.names())
    later = site.learner("other")
    assert later.highest_epoch() == 1, "on a machine without a version"
    theirs = later.publish(9, 3, tensors(), CANARY)
    again = site.publish(9, epoch=2)
    assert sorted(site.files()) == sorted([*names[2:], theirs, again]), "the newest three, and the later learner's"


@pytest.mark.parametrize(("staleness", "every", "count"), [(5, 1, 7), (5, 2, 4), (0, 1, 3)])
def test_versions_stay_as_long_as_a_slow_machine_may_roll_out_with_them(site, monkeypatch, staleness, every, count):
    """One that needs five publications to fetch a version still gets it whole, if the staleness bound is five."""
    monkeypatch.setattr(transport_module, "open_objects", lambda _: open_objects(site.url))
    options = ("--pool.max_staleness", str(staleness), "--learner.publish_every", str(every))
    options += ("--weights.transport", "object", "--weights.objects", "s3://bucket/run")
    store = ObjectTransport(config(*options, "--run.folder", str(site.folder / "run"))).store()
    names = [store.publish(version, 1, tensors(), CANARY) for version in range(0, 10 * every, every)]
    assert store.names() == names[-3:]
    assert sorted(site.files()) == names[-count:]


async def test_a_copy_of_another_run_is_not_taken_for_this_ones(site, caplog):
    """After a reset versions have the same names again."""
    name = site.publish(1)
    await site.host().open(name)
    other = site.learner("other")
    assert other.publish(1, 1, tensors(9), CANARY) == name
    opened = await site.host().open(name)
    assert same(opened, tensors(9))
    assert "is of another run than" in caplog.text


async def test_a_copy_is_taken_while_the_store_does_not_answer(site, monkeypatch):
    name = site.publish(1)
    await site.host().open(name)
    site.host()._objects.remove(f"{name}/{MANIFEST}")
    assert same(await site.host().open(name), tensors(1))


async def test_a_damaged_copy_is_fetched_again(site):
    """A machine that lost its power has the file's name and length, and not its content."""
    name = site.publish(1)
    opened = await site.host().open(name)
    file = opened.directory / TENSORS
    file.write_bytes(bytes(file.stat().st_size))
    assert same(await site.host().open(name), tensors(1))


async def test_a_clock_that_goes_back_does_not_remove_what_was_just_fetched(site):
    for version in range(3):
        opened = await site.host().open(site.publish(version))
        os.utime(opened.directory, (2e9, 2e9))
    opened = await site.host().open(site.publish(3))
    assert same(opened, tensors(3))


def test_versions_that_cannot_be_removed_do_not_end_the_learner(site, monkeypatch, caplog):
    def refuses(own, path):
        raise WriteFailed(f"cannot remove {path}: denied")

    monkeypatch.setattr(Objects, "remove", refuses)
    names = [site.publish(version) for version in range(5)]
    assert sorted(site.files()) == names
    assert "old versions stay in the object store until the next one: cannot remove" in caplog.text


def test_a_version_is_not_published_again_because_the_store_cannot_be_asked(site, monkeypatch, caplog):
    """As a learner that starts again would: during an outage that ended it."""
    name = site.publish(1)

    def unreachable(own):
        raise WeightsUnavailable("cannot list the store")

    with monkeypatch.context() as outage:
        outage.setattr(Objects, "paths", unreachable)
        assert site.store.verify(name).version == 1
    assert "cannot list the store; v000001-e1 is taken to be there" in caplog.text
    site.host()._objects.remove(f"{name}/{MANIFEST}")
    with pytest.raises(WeightsUnavailable, match="has no whole version v000001-e1"):
        site.store.verify(name)


def test_what_is_kept_for_the_evaluator_stays(site):
    store = ObjectStore(site.folder / "weights", open_objects(site.url), keeps=lambda version: version == 0)
    for version in range(5):
        store.publish(version, 1, tensors(version), CANARY)
    assert {name.split("-")[0] for name in site.files()} == {"v000000", "v000002", "v000003", "v000004"}


def test_a_manifest_comes_last_and_goes_first(site, monkeypatch):
    """A machine that fails in between leaves no version that seems whole."""
    done = noted_calls(monkeypatch)
    for version in range(4):
        site.publish(version)
    put = [path for what, path in done if what == "put"]
    assert put[:2] == [f"v000000-e1/{TENSORS}", f"v000000-e1/{MANIFEST}"]
    assert [path for what, path in done if what == "delete"] == [f"v000000-e1/{MANIFEST}", f"v000000-e1/{TENSORS}"]


async def test_a_version_without_its_manifest_is_none_and_the_next_learner_removes_it(site, monkeypatch):
    put = Objects.put

    def cut(own, path, file):
        if path.endswith(MANIFEST):
            raise WriteFailed("the connection is cut")
        put(own, path, file)

    monkeypatch.setattr(Objects, "put", cut)
    with pytest.raises(WriteFailed):
        site.publish(1)
    monkeypatch.setattr(Objects, "put", put)
    assert site.files() == {"v000001-e1": {TENSORS}}
    assert await site.host().names() == []
    with pytest.raises(WeightsUnavailable, match="v000001-e1"):
        await site.host().open("v000001-e1")
    with pytest.raises(WeightsUnavailable, match="no whole version v000001-e1"):
        site.store.verify("v000001-e1")
    name = site.publish(2, epoch=2)
    assert site.files() == {name: {TENSORS, MANIFEST}}


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (TENSORS, lambda whole: whole[:-9] + bytes(9), "v000001-e1 at .* is damaged"),
        (TENSORS, lambda whole: whole[:-9], "v000001-e1 at .* is damaged"),
        (TENSORS, lambda whole: whole + b"x", "v000001-e1 at .* is damaged"),
        (MANIFEST, lambda whole: whole[:-9], "missing or damaged"),
        (MANIFEST, lambda whole: whole.replace(b'"version":1', b'"version":2'), "has the manifest of v000002-e1"),
    ],
)
async def test_a_damaged_version_is_not_loaded_and_nothing_of_it_stays(site, file, change, message):
    name = site.publish(1)
    site.write(name, file, change((site.store.directory(name) / file).read_bytes()))
    with pytest.raises(WeightsUnavailable, match=message):
        await site.host().open(name)
    assert {path.name for path in (site.folder / "worker" / "downloaded").iterdir()} == {".lock"}


async def test_names_that_point_elsewhere_are_refused(site):
    site.write("x", "secret", b"")

    assert site.files() == {}
    with pytest.raises(WeightsUnavailable, match="is not the name of a weight version"):
        await site.host().open("../x")


@pytest.mark.slow
@pytest.mark.skipif(not SERVER.exists(), reason=f"{SERVER}: make setup-sdks")
async def test_a_bucket_that_is_not_there_is_named(s3, tmp_path, monkeypatch):  # noqa: F811
    for name, value in s3_environment(s3).items():
        monkeypatch.setenv(name, value)
    site = Site(tmp_path, "s3://nowhere-at-all/x")
    with pytest.raises(WriteFailed, match=r"cannot write v000001-e1/model.safetensors to s3://nowhere-at-all/x: .*"):
        site.publish(1)
    with pytest.raises(WeightsUnavailable, match=r"cannot read v000001-e1/manifest.json from s3://nowhere-at-all/x: "):
        await site.host().open("v000001-e1")


def config(*options: str) -> Config:
    return load_config(shipped_configs()["atlas"], options)


def test_without_obstore_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtra, match=r"obstore is not installed: pip install 'cusearch-async\[objects\]'"):
        ObjectTransport(config("--weights.transport", "object", "--weights.objects", "s3://bucket/run"))


def test_the_setting_makes_the_transport_and_what_does_not_fit_is_named(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    found = ObjectTransport(config("--weights.transport", "object", "--weights.objects", "s3://bucket/run/"))
    assert found.store()._objects.url == "s3://bucket/run"
    for options, message in (
        (("--weights.transport", "object"), "needs weights.objects, like s3://bucket/prefix"),
        (("--weights.objects", "s3://bucket"), "of no use without weights.transport = 'object'"),
        (("--weights.transport", "object", "--weights.objects", "ftp://x/y"), "must look like s3://bucket/prefix"),
        (("--weights.transport", "object", "--weights.objects", "s3://me:secret@b/x"), "must not hold a password"),
    ):
        with pytest.raises(ConfigError, match=message):
            config(*options)


async def test_a_prefix_is_for_one_run(tmp_path, monkeypatch, store_url):  # noqa: F811
    """The learner of another would remove its versions."""
    monkeypatch.setattr(transport_module, "open_objects", lambda _: open_objects(store_url))
    options = ("--weights.transport", "object", "--weights.objects", "s3://bucket/run")

    def transport(run: str) -> ObjectTransport:
        folder = tmp_path / run
        run_folder.mark(folder, run)
        return ObjectTransport(config(*options, "--run.name", run, "--run.folder", str(folder)))

    for _ in range(2):
        async with transport("one").serving():
            pass
    with pytest.raises(ConfigError, match=r"is for run 'one', not for 'two'; choose another prefix"):
        async with transport("two").serving():
            pass
    shutil.rmtree(tmp_path / "one")  # or on another host: a run of the same name
    with pytest.raises(ConfigError, match=r"another run 'one' than this folder's, made 20.*delete what is there"):
        async with transport("one").serving():
            pass


def test_an_error_of_s3_is_told_with_its_code_and_message():
    """They are in XML, whose first line says nothing."""
    answer = (
        'Generic S3 error: 403 Forbidden: <?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>SignatureDoesNotMatch'
        "</Code><Message>The signature does not match</Message><RequestId>7</RequestId></Error>"
    )
    told = "Generic S3 error: 403 Forbidden: SignatureDoesNotMatch: The signature does not match"
    assert reason_of(OSError(answer)) == told
    assert reason_of(OSError("no route to host\nmore")) == "no route to host"
