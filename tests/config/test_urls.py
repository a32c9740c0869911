"""Addresses in the config: what they may hold, and what no message repeats."""

from __future__ import annotations

import re

import pytest

from cusearch_async.config import known_keys, load_config
from tests.config.lines import error_of

URLS = ("retriever.url", "retriever.zerosearch.url", "retriever.web.url", "eval.judge.url", "weights.url", "alarms.url")


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:hunter2@h:1/0",
        "redis://:hunter2@h",
        "http://:hunter2@h",
        "//:hunter2@h",
        "u:hunter2@h",
        "redis://u:hunter2//@h",
        "rediss://h:1/0?ssl_password=hunter2",
        "redis://h:1/0?password=hunter2",
        "rediss://h:1/0?ssl_ca_certs=a.pem&password=hunter2",
    ],
)
def test_a_password_in_the_url_is_refused_and_not_repeated(write, url):
    said = error_of(write(), "--redis.url", url)
    assert "CUSEARCH_REDIS_PASSWORD" in said
    assert "hunter2" not in said


@pytest.mark.parametrize("key", URLS)
@pytest.mark.parametrize(
    "url",
    [
        "http://u:hunter2@h:1/v1",
        "http://:hunter2@h",
        "http://hunter2@h/v1",
        "http://u:hunter2/x@h:1",
        "http://u:hunter2//x@h:1",
        "http://u:hunter2@h:99999",
        "u:hunter2@h:1",
        "http://h:1/v1?api_key=hunter2",
        "http://h:1/v1?access_token=hunter2",
    ],
)
def test_a_password_in_the_url_of_any_service_is_refused_and_not_repeated(write, key, url):
    said = error_of(write(), f"--{key}", url)
    assert "url must not hold a password; " in said
    assert "hunter2" not in said


def test_every_url_in_the_config_is_one_of_those(write):
    with_url = {key for key in known_keys() if key.rpartition(".")[2] == "url"}
    assert with_url - {"redis.url"} == set(URLS)


@pytest.mark.parametrize("url", ["redis://h/x", "redis://h/0/1", "rediss://h/-1", "redis://h/1.5"])
def test_a_database_that_is_no_number_is_refused(write, url):
    assert re.search("must end in the number of a database", error_of(write(), "--redis.url", url))


@pytest.mark.parametrize(
    ("url", "name"),
    [("redis://h/0?db=3", "db"), ("redis://h/0?ssl_ca_certs=a.pem", "ssl_ca_certs"), ("rediss://h/0?ssl_x=1", "ssl_x")],
)
def test_an_option_that_does_nothing_there_is_refused(write, url, name):
    assert f"url takes no option '{name}'; rediss:// takes ssl_ca_certs, " in error_of(write(), "--redis.url", url)


def test_a_user_with_encoded_characters_is_accepted(write):
    for url in ("redis://team%40lab@h:1/3", "redis+sentinel://team%40lab@a:1,b:1/runs/0"):
        assert load_config(write(), ["--redis.url", url]).redis.url == url


@pytest.mark.parametrize(
    ("url", "whole", "place"),
    [
        *((f"redis://h{rest}", "redis://h:6379/0", "redis://h:6379/0") for rest in ("", "/", ":", "/0", ":6379/00")),
        ("redis://me@h/3", "redis://me@h:6379/3", "redis://h:6379/3"),
        ("redis://[::1]", "redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("rediss://h?ssl_keyfile=k.pem", "rediss://h:6379/0?ssl_keyfile=k.pem", "rediss://h:6379/0"),
    ],
)
def test_two_spellings_of_one_redis_are_one_place(write, url, whole, place):
    """A run whose Redis had lost its data was refused as that of another, and a launch did not know its Redis again."""
    redis = load_config(write(), ["--redis.url", url]).redis
    assert (redis.url, redis.place) == (whole, place)


def test_another_transport_is_no_redis(write):
    assert load_config(write(), ["--redis.transport", "mine:buffer"]).redis.place == "mine:buffer"
