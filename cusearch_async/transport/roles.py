"""Permissions of the processes of a run in your own Redis: one ACL user per role.

A worker runs only the commands that its code sends: it reads the keys of its run, runs the four scripts of workers, and
writes only the keys of these scripts. It cannot write `state`, pools, `sizes` or `memory`, so it can neither take over
the run nor announce, commit, checkpoint, pause, quarantine or reset. Not covered: a worker can damage the keys that it
writes (trajectories, leases, the ledger), and fill the server's memory.
Learner and operator may do anything with the keys of their run. No role reaches the keys of another run or the server's
settings, or runs scripts other than ours. Not covered: SCAN, RANDOMKEY and DBSIZE, which Redis answers with the names
and the number of all keys, are allowed to learner and operator.

This needs the read-only key patterns and selectors of Redis 7; Redis 6 refuses the rules. The rules name scripts by
their checksums, so each version of this package needs the rules that it prints itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha1

from cusearch_async.transport.keys import Keys
from cusearch_async.transport.scripts import SCRIPTS, script

ROLES = ("worker", "learner", "operator")
SCRIPTS_OF_WORKERS = ("admit", "put", "heartbeat", "release")
WRITTEN_BY_WORKERS = (
    "lease",
    "owner",
    "leased_at",
    "hedged",
    "requeue",
    "groups",
    "ready",
    "attempts",
    "incomplete",
    "waiting",
    "depth_by_version",
    "ledger",
    "clock",
    "next_ticket",
    "news",
    "workers",
    "worker:*",
    "depth:*",
    "traj:*",
    "payload:*",
    "staged:*",
)
_DELETED_BY_WORKERS = ("worker:*", "staged:*")
_SENT_BY_WORKERS = ("get", "hgetall", "hlen", "pttl", "set", "time", "xread", "zcard", "zcount", "zmscore", "zrange")
"""Besides scripts, and what makes a connection or a transaction."""
_EVERYTHING = "resetchannels +@all -@dangerous -@scripting +info"
_SCRIPT_COMMAND = re.compile(r"call\('(\w+)'")


def rules(role: str, run: str) -> str:
    """The permissions of a role in the syntax of Redis's ACL, without user name and password."""
    prefix = Keys(run).prefix
    if role == "operator":
        return f"~{prefix}* {_EVERYTHING} {_scripts(SCRIPTS)} +client|list +slowlog|get"
    if role == "learner":
        return f"~{prefix}* {_EVERYTHING} {_scripts(SCRIPTS)}"
    written = " ".join(f"~{prefix}{name}" for name in WRITTEN_BY_WORKERS)
    deleted = " ".join(f"~{prefix}{name}" for name in _DELETED_BY_WORKERS)
    inside = {found.lower() for name in SCRIPTS_OF_WORKERS for found in _SCRIPT_COMMAND.findall(script(name))}
    commands = " ".join(f"+{command}" for command in sorted(inside.union(_SENT_BY_WORKERS) - {"unlink"}))
    # Redis counts the key of a script as written. The selector allows it for the call; the script's commands are
    # checked separately.
    return (
        f"%R~{prefix}* {written} resetchannels +@connection +@transaction -@dangerous {commands} "
        f"(+unlink {deleted}) ({_scripts(SCRIPTS_OF_WORKERS)} ~{Keys(run).state})"
    )


def _scripts(names: Iterable[str]) -> str:
    """Who runs a script must be able to load it: a server that starts again has none."""
    return " ".join(["+script|load", *(f"+evalsha|{sha1(script(name).encode()).hexdigest()}" for name in names)])  # noqa: S324


def acl_file(run: str, passwords: dict[str, str]) -> str:
    """The content of Redis's `aclfile` for one run: a user RUN-ROLE for each role; the default user is off.

    `passwords` has a password without blanks for each role."""
    users = [f"user {run}-{role} on >{passwords[role]} {rules(role, run)}" for role in ROLES]
    return "\n".join(["user default off", *users]) + "\n"
