"""What the processes of a run may do in a Redis of one's own: an ACL user for each role.

A worker reads all of its run, runs the four scripts of workers and no other, and writes what these write. It cannot
write `state`, pools, `sizes` or `memory`, so it can neither take the run over nor announce, commit, checkpoint, pause
or quarantine anything, nor reset the run. Not covered: what a worker writes anyway (trajectories, leases, the ledger)
it can spoil. Learner and operator own all keys of their run: who may pause or reset a run can do anything to
it. Nobody reaches another run, or the server.

This needs the read-only key patterns and selectors of Redis 7; Redis 6 knows neither, and refuses the rules. The rules
name scripts by their checksums: another version of this package needs the rules that it prints itself.
"""

from __future__ import annotations

from hashlib import sha1

from cusearch_async.transport.keys import Keys
from cusearch_async.transport.scripts import script

ROLES = ("worker", "learner", "operator")
_SCRIPTS_OF_WORKERS = ("admit", "put", "heartbeat", "release")
_WRITTEN_BY_WORKERS = (
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
    """The permissions of a role in the words of Redis's ACL, without user name and password."""
    prefix = Keys(run).prefix
    if role == "operator":
        return f"~{prefix}* {_COMMANDS} +client|list +slowlog|get"
    if role == "learner":
        return f"~{prefix}* {_COMMANDS}"
    written = " ".join(f"~{prefix}{name}" for name in _WRITTEN_BY_WORKERS)
    deleted = " ".join(f"~{prefix}{name}" for name in _DELETED_BY_WORKERS)
    denied = " ".join(f"-{command}" for command in _DENIED_TO_WORKERS)
    scripts = " ".join(f"+evalsha|{sha1(script(name).encode()).hexdigest()}" for name in _SCRIPTS_OF_WORKERS)  # noqa: S324
    # The key of a script counts as written. It is let through for the call; what a script does is checked once more.
    return f"%R~{prefix}* {written} {_COMMANDS} {denied} (+unlink {deleted}) ({scripts} ~{Keys(run).state})"


def acl_file(run: str, passwords: dict[str, str]) -> str:
    """What Redis's `aclfile` holds for one run: a user RUN-ROLE for each role, and no user without a name.

    `passwords` has one without blanks for each role."""
    users = [f"user {run}-{role} on >{passwords[role]} {rules(role, run)}" for role in ROLES]
    return "\n".join(["user default off", *users]) + "\n"
