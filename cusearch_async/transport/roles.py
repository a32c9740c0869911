"""Permissions of the processes of a run in your own Redis: one ACL user per role.

A worker reads all keys of its run, runs only the four scripts of workers, and writes only the keys of these scripts. It
cannot write `state`, pools, `sizes` or `memory`, so it can neither take over the run nor announce, commit, checkpoint,
pause, quarantine or reset. Not covered: a worker can damage the keys that it writes (trajectories, leases, the ledger).
Learner and operator may do anything with the keys of their run. No role reaches another run, or the server.

This needs the read-only key patterns and selectors of Redis 7; Redis 6 refuses the rules. The rules name scripts by
their checksums, so each version of this package needs the rules that it prints itself.
"""

from __future__ import annotations

from hashlib import sha1

from cusearch_async.transport.keys import Keys
from cusearch_async.transport.scripts import script

ROLES = ("worker", "learner", "operator")
SCRIPTS_OF_WORKERS = ("admit", "put", "heartbeat", "release")
WRITTEN_BY_WORKERS = (
    "lease",
    "owner",
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
_COMMANDS = "resetchannels +@all -@dangerous +info +config|get"
_DENIED_TO_WORKERS = ("del", "unlink", "getdel", "eval", "evalsha", "function")


def rules(role: str, run: str) -> str:
    """The permissions of a role in the syntax of Redis's ACL, without user name and password."""
    prefix = Keys(run).prefix
    if role == "operator":
        return f"~{prefix}* {_COMMANDS} +client|list +slowlog|get"
    if role == "learner":
        return f"~{prefix}* {_COMMANDS}"
    written = " ".join(f"~{prefix}{name}" for name in WRITTEN_BY_WORKERS)
    deleted = " ".join(f"~{prefix}{name}" for name in _DELETED_BY_WORKERS)
    denied = " ".join(f"-{command}" for command in _DENIED_TO_WORKERS)
    scripts = " ".join(f"+evalsha|{sha1(script(name).encode()).hexdigest()}" for name in SCRIPTS_OF_WORKERS)  # noqa: S324
    # Redis counts the key of a script as written. The rule allows it for the call; the script's commands are checked
    # separately.
    return f"%R~{prefix}* {written} {_COMMANDS} {denied} (+unlink {deleted}) ({scripts} ~{Keys(run).state})"


def acl_file(run: str, passwords: dict[str, str]) -> str:
    """The content of Redis's `aclfile` for one run: a user RUN-ROLE for each role; the default user is off.

    `passwords` has a password without blanks for each role."""
    users = [f"user {run}-{role} on >{passwords[role]} {rules(role, run)}" for role in ROLES]
    return "\n".join(["user default off", *users]) + "\n"
