"""An object store for tests: a folder always, and moto's S3 where `make setup-sdks` was run."""

from __future__ import annotations

import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

from tests.agents.test_sdks import PYTHON
from tests.conftest import SLOW, free_port, wait_until

SERVER = PYTHON.with_name("moto_server")
S3 = pytest.param(
    "s3", marks=[pytest.mark.slow, pytest.mark.skipif(not SERVER.exists(), reason=f"{SERVER}: make setup-sdks")]
)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of a server."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([SERVER, "-H", "127.0.0.1", "-p", f"{port}"], stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: answers(f"{url}/moto-api/"), 60 * SLOW)
            yield url
        finally:
            server.kill()


def make_bucket(endpoint: str, bucket: str) -> None:
    """When the server answers."""
    wait_until(lambda: answers(f"{endpoint}/moto-api/"), 60 * SLOW)
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")).close()


def s3_environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "of-this-test",
        "AWS_SECRET_ACCESS_KEY": "of-this-test",
    }


@pytest.fixture(params=["file", S3])
def store_url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of an empty place."""
    if request.param == "file":
        (tmp_path / "store").mkdir()
        return f"file://{tmp_path}/store"
    endpoint, bucket = request.getfixturevalue("s3"), f"b-{os.urandom(6).hex()}"
    for name, value in s3_environment(endpoint).items():
        monkeypatch.setenv(name, value)
    make_bucket(endpoint, bucket)
    return f"s3://{bucket}/of/a/run"


def noted_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is put and deleted from now on, with its path."""
    done: list[tuple[str, str]] = []
    for name in ("put", "delete"):
        call = getattr(obstore, name)
        monkeypatch.setattr(
            obstore,
            name,
            lambda *args, call=call, name=name, **more: done.append((name, args[1])) or call(*args, **more),
        )
    return done
