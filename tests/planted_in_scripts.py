"""Planted bugs in Redis' scripts that were found to survive once: `mutants.py` plants them too."""

from __future__ import annotations


def lua(name: str, tests: str = "interface") -> tuple[str, str]:
    return f"transport/lua/{name}.lua", f"test_{tests}.py"


SCRIPTS = {
    "weights published again are not announced": (
        lua("announce", "claims"),
        "version < run.published",
        "version <= run.published",
    ),
    "a commit resizes what is granted": (lua("commit"), "state(method, next_ticket)", "state(method, 0)"),
    "a full buffer takes one more byte": (lua("put"), ">= run.limit_bytes", "> run.limit_bytes"),
    "a stored payload expires": (
        lua("put", "buffer"),
        "redis.call('PERSIST', payload(id))",
        "redis.call('EXISTS', payload(id))",
    ),
    "attempts are kept for ever": (lua("claim", "buffer"), "  redis.call('HDEL', key('attempts'), ticket)\n", ""),
    "another pool is taken than was checked": (
        lua("claim", "buffer"),
        "if id ~= ARGV[3 + i] then return false end",
        "",
    ),
    "what is not granted yet is requeued": (
        lua("claim"),
        "math.min((step + 1) * questions, granted) - 1",
        "(step + 1) * questions - 1",
    ),
    "a group misses pool after pool": (lua("claim", "deferred"), "if due < 0 or", "if true or"),
    "what was taken is not recorded": (
        lua("claim", "deferred"),
        "if deferred then redis.call('ZADD'",
        "if false then redis.call('ZADD'",
    ),
    "what was taken is not missed": (lua("claim", "deferred"), "if deferred and step > 0 and", "if false and"),
    "a checkpoint forgets what was taken ahead": (
        lua("checkpoint", "deferred"),
        "(step - run.defer - 1) * run.questions - 1",
        "'+inf'",
    ),
    "a step whose pool was lost takes other tickets": (
        lua("recover", "deferred"),
        "local keeps = deferred and not another_contract",
        "local keeps = false",
    ),
    "what was taken is generated again": (lua("recover", "deferred"), "and not was_taken[name]", ""),
    "all that is nowhere was taken": (lua("recover", "deferred"), "counted < first - before and", ""),
    "the number of pools that a group may miss changes": (
        lua("recover", "run_contract"),
        "'order', 'defer'}",
        "'order'}",
    ),
    "a lease is hedged by all": (
        lua("admit", "deferred"),
        "    redis.call('ZADD', key('leased_at'), time, ticket)",
        "",
    ),
    "a worker hedges its own leases": (
        lua("admit", "deferred"),
        "redis.call('HGET', key('owner'), ticket) == name or ",
        "",
    ),
    "a worker hedges its own hedge": (
        lua("admit", "deferred"),
        " or redis.call('HGET', key('hedged'), ticket) == name\n",
        "\n",
    ),
    "young leases are hedged": (lua("admit", "deferred"), "time - 1000 * run.hedge_s", "'+inf'"),
    "who hedges a ticket does not get its lease": (
        lua("common", "deferred"),
        "if not hedger then return",
        "if true then return",
    ),
    "a worker is told that open groups are closed": (
        lua("heartbeat", "deferred"),
        "elseif not is_open(ARGV[i]) then",
        "else",
    ),
    "what is needed much later is hedged": (lua("admit", "deferred"), "tonumber(ticket) < needed_soon and", "true and"),
    "a late release ends a new lease": (lua("release", "buffer"), "then return 0 end", "then end"),
    "a hedge that failed is tried by all": (lua("release", "deferred"), "if not failed then", "if true then"),
    "a pool of which a part is lost is committed": (
        lua("commit", "damage"),
        "if #ids ~= tonumber(redis.call('HGET', pool_info_key(step), 'size') or -1)",
        "if false",
    ),
    "what is not in the pool is trained": (
        lua("commit", "damage"),
        "elseif redis.call('HEXISTS', key('quarantine'), ARGV[i]) == 0 then",
        "elseif false then",
    ),
    "the shown version is one step behind": (lua("commit", "buffer"), "'version', step + 1)", "'version', step)"),
    "a commit resizes what has a size": (lua("common"), "'HSETNX', key('sizes')", "'HSET', key('sizes')"),
    "a quarantine that comes again is done again": (lua("quarantine", "buffer"), "if before then", "if false then"),
    "a replaced learner quarantines": (lua("quarantine", "damage"), "if refused then return refused end", ""),
    "only the current pool is quarantined from": (
        lua("quarantine", "damage"),
        "end_of_pools(run.step or 0) - 1 do",
        "(run.step or 0) do",
    ),
    "a pool behind a gap is not found": (
        lua("common", "interface_learner"),
        "math.max(step, run.pools_end or 0)",
        "step",
    ),
    "a learner of the future is a replaced one": (
        lua("common", "damage"),
        "if run.epoch < tonumber(epoch) then return lost",
        "if false then return lost",
    ),
    "fields of another method stay": (
        lua("common", "damage"),
        "do redis.call('HDEL', state, name) end\n  local names",
        "do end\n  local names",
    ),
    "the last ticket is granted again": (
        lua("recover", "damage"),
        "next_ticket = math.max(next_ticket, tonumber(ticket) + 1)",
        "next_ticket = math.max(next_ticket, tonumber(ticket))",
    ),
    "what is claimed again is shown as trained": (
        lua("recover", "damage"),
        "redis.call('HSET', traj(id), 'state', 'claimed')",
        "redis.call('EXISTS', traj(id))",
    ),
    "trajectories of another contract are kept": (
        lua("recover", "changed_contract"),
        "elseif another_contract or pool.size == 0 then",
        "elseif pool.size == 0 then",
    ),
    "trajectories of another contract stay buffered": (
        lua("recover", "changed_contract"),
        "if another_contract then\n  for _, id in",
        "if false then\n  for _, id in",
    ),
    "tickets in flight under another contract go on": (
        lua("recover", "changed_contract"),
        "if another_contract or (has_nothing",
        "if (has_nothing",
    ),
    "a group without a success is never generated again": (
        lua("recover"),
        "(has_nothing and redis.call('ZSCORE', key('ready'), ticket))",
        "false",
    ),
    "a group that is generated again has no attempt left": (
        lua("recover"),
        "  redis.call('HDEL', key('attempts'), ticket)\n  to_requeue",
        "  to_requeue",
    ),
}
