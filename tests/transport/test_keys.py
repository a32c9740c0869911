"""The names of the keys of a run: the scripts and the docs spell those of keys.py, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from cusearch_async.transport.keys import Keys
from cusearch_async.transport.roles import WRITTEN_BY_WORKERS
from cusearch_async.transport.scripts import SCRIPTS, script

DOCS = Path(__file__).parents[2] / "docs"
NAMES = {key.name.partition(":")[0] for key in vars(Keys).values() if hasattr(key, "name")}


def names_in(code: str) -> set[str]:
    """Of keys in a script, also those that a loop goes through."""
    names = set(re.findall(r"(?:\bkey\(|\bprefix \.\. )'([\w-]+)", code))
    for listed, body in re.findall(r"for _, name in ipairs\(\{('[^}]*)\}\) do(.*?)\bend\b", code, re.DOTALL):
        if "key(name)" in body:
            names.update(re.findall(r"'([\w-]+)'", listed))
    return names


def test_a_key_has_one_name():
    keys = Keys("r")
    assert (keys.state, keys.lease) == ("cusearch:{r}:state", "cusearch:{r}:lease")
    assert (keys.trajectory("3:0"), keys.pool_info(7)) == ("cusearch:{r}:traj:3:0", "cusearch:{r}:pool:7:facts")


def test_the_scripts_use_all_keys_and_no_others():
    assert set().union(*(names_in(script(name)) for name in SCRIPTS)) == NAMES - {"state"}, "that one they are given"


def test_names_in_a_loop_are_found():
    loop = "for _, name in ipairs({'lease', 'typo'}) do redis.call('ZREM', key(name), 1) end"
    assert names_in(loop + " local a = key('owner') .. key('depth:' .. 1)") == {"lease", "typo", "owner", "depth"}


def test_the_kinds_that_a_learner_expects_are_of_keys():
    kinds = script("recover").split("local kinds = {")[1].split("}")[0]
    assert set(re.findall(r"(\w+) = '", kinds)) < NAMES


def test_workers_may_write_only_what_is_a_key():
    assert {name.partition(":")[0] for name in WRITTEN_BY_WORKERS} < NAMES


def test_the_page_on_redis_lists_every_key():
    page = (DOCS / "redis.md").read_text(encoding="utf-8").split("\n## Keys\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^- `([\w-]+)", page, re.MULTILINE)) == NAMES
