-- Shared code before every script. KEYS[1] is the run's state; every other key of the run shares its hash tag. The run
-- limits (group sizes, bounds, room) come from `limits`, which the learner writes, never from the caller.
local state = KEYS[1]
local prefix = string.sub(state, 1, -6)
local function key(name) return prefix .. name end

local function hash(name)  -- field -> value, as text
  local listed, fields = redis.call('HGETALL', name), {}
  for i = 1, #listed, 2 do fields[listed[i]] = listed[i + 1] end
  return fields
end

local run = {}  -- the fields of `state` and of `limits`
for _, name in ipairs({state, key('limits')}) do
  for field, value in pairs(hash(name)) do run[field] = tonumber(value) or value end
end

local function traj(id) return prefix .. 'traj:' .. id end
local function payload(id) return prefix .. 'payload:' .. id end
local function pool_key(step) return prefix .. 'pool:' .. step end
local function pool_info_key(step) return prefix .. 'pool:' .. step .. ':facts' end
local function count(name, by) if by ~= 0 then redis.call('HINCRBY', key('ledger'), name, by) end end
local by_tickets = run.order ~= 'oldest_complete'  -- N groups a step, and admission ends with the run
local deferred = run.order == 'deferred'
local function ticket_of(id) return string.match(id, '^%d+') end
local function lost(what) return redis.error_reply('LOST ' .. what) end  -- the next learner repairs it
local function damaged(what) return redis.error_reply('DAMAGED ' .. what) end  -- no learner can

-- The whole number >= 0 that a text holds, else nil. `text` may be false.
local function natural(text) return text and #text < 15 and string.match(text, '^%d+$') and tonumber(text) or nil end

-- No ticket above it can have been granted at `step`, when `known` tickets are in some place. Loops over tickets end
-- there: workers write `next_ticket`.
local function ticket_bound(step, known) return (step + run.max_staleness + 2) * run.questions + known end

-- Wake the workers that wait for something to do.
local function tell()
  local function add(call) return call('XADD', key('news'), 'MAXLEN', 1, '*', 'of', run.epoch or 0) end
  if type(add(redis.pcall)) == 'table' then  -- an error: it is no stream, or its last id is used up
    redis.call('UNLINK', key('news'))
    add(redis.call)
  end
end

-- The error for a learner of `epoch` that Redis has lost, or that another has replaced. Else nil.
local function refusal_of(epoch)
  if run.epoch == tonumber(epoch) then return not run.questions and lost('the run limits are missing') or nil end
  if not run.epoch then return lost('the keys of the run are missing') end
  if run.epoch < tonumber(epoch) then return lost('its newest learner has epoch ' .. run.epoch .. ', this one has ' .. epoch) end
  return redis.error_reply('FENCED')
end

-- The error for a process that means another run; it contains this run's identity.
local function another_run()
  local terms = hash(key('contract'))
  terms.digest = nil
  local place = redis.call('HMGET', state, 'run_id', 'host', 'folder')  -- as text, which `run` is not
  local found = {terms = terms, run_id = place[1] or '', host = place[2] or '', folder = place[3] or ''}
  return redis.error_reply('ANOTHER ' .. cjson.encode(found))
end

-- That error for a process whose contract has another digest than the run contract, or that has joined an earlier run of
-- this name. Else nil. `joined`: "digest run_id", the second for a process that has learned it.
local function contract_refusal(joined)
  local digest, run_id = string.match(joined, '^(%S*) ?(.*)$')
  if (redis.call('HGET', key('contract'), 'digest') or '') ~= digest then return another_run() end
  if run_id ~= '' and (redis.call('HGET', state, 'run_id') or run_id) ~= run_id then return another_run() end
end

local function without_limits() return run.epoch and not run.questions and lost('the run limits are missing') or nil end

-- The run's clock and the server's clock, in milliseconds. The run's clock advances with the server's, but by at most
-- half a lease from one call to the next: an outage, or a jump of the server's clock, ends no leases.
local function now()
  local time = redis.call('TIME')
  local wall = time[1] * 1000 + math.floor(time[2] / 1000)
  local last = redis.call('HMGET', key('clock'), 'wall', 'run')
  local passed = math.min(wall - (tonumber(last[1]) or wall), math.floor(run.lease_ms / 2))
  -- a clock that is gone continues where the newest lease was granted: else old ones would hardly end
  local newest = not last[2] and redis.call('ZREVRANGE', key('lease'), 0, 0, 'WITHSCORES')[2]
  local before = tonumber(last[2]) or math.max(0, (tonumber(newest) or 0) - run.lease_ms)
  local clock = before + math.max(0, passed)
  redis.call('HSET', key('clock'), 'wall', wall, 'run', clock)
  return clock, wall
end

-- Store the state of the selection method: its memory as text, its fields in `state`, and the sizes of groups: one that
-- is `granted` (a ticket below it), or has a size, keeps its size.
local function save_method_state(method, granted)
  redis.call('SET', key('memory'), method.memory)
  for name in string.gmatch(run.method_fields or '', '%S+') do redis.call('HDEL', state, name) end
  local names = {}
  for name, value in pairs(method.fields) do
    names[#names + 1] = name
    redis.call('HSET', state, name, value)
  end
  redis.call('HSET', state, 'method_fields', table.concat(names, ' '))
  for ticket, size in pairs(method.sizes) do
    if tonumber(ticket) >= granted then redis.call('HSETNX', key('sizes'), ticket, size) end
  end
end

local function group_size(ticket) return tonumber(redis.call('HGET', key('sizes'), ticket)) or run.rollouts end

local function slots_of(ticket)
  local ids = {}
  for rollout = 0, group_size(ticket) - 1 do ids[rollout + 1] = ticket .. ':' .. rollout end
  return ids
end

-- Whether the same process has made a later request for tickets than that with the token "process/number".
local function is_overtaken(worker, token)
  local process, number = string.match(token, '^(.*/)(%d+)$')
  local last = redis.call('HGET', worker, 'admit_token') or ''
  local last_process, last_number = string.match(last, '^(.*/)(%d+)$')
  return process == last_process and tonumber(number) < tonumber(last_number)
end

-- Rollouts of a ticket that are not buffered.
local function missing(ticket)
  local ids, lacking = slots_of(ticket), {}
  local waiting = redis.call('HMGET', key('waiting'), unpack(ids))
  for i, id in ipairs(ids) do
    if not waiting[i] then lacking[#lacking + 1] = id end
  end
  return lacking
end

local function add_to_buffer(id, depth, version, bytes)
  redis.call('HSET', key('waiting'), id, depth .. ':' .. version .. ':' .. bytes)
  redis.call('ZADD', key('depth:' .. depth), ticket_of(id), id)
  redis.call('HINCRBY', key('depth_by_version'), depth .. ':' .. version, 1)
  count('buffered', 1)
  count('bytes', bytes)
end

-- Remove a trajectory from the buffer; true if it was buffered. Does not read its hash and payload, which may be gone.
local function remove_from_buffer(id)
  local known = redis.call('HGET', key('waiting'), id)
  if not known then return false end
  local cell, depth, bytes = string.match(known, '^((%d+):%-?%d+):(%d+)$')
  local bucket = key('depth:' .. depth)  -- an error before the first write, where `known` is damaged
  redis.call('HDEL', key('waiting'), id)
  redis.call('ZREM', bucket, id)
  if redis.call('HINCRBY', key('depth_by_version'), cell, -1) <= 0 then redis.call('HDEL', key('depth_by_version'), cell) end
  count('buffered', -1)
  count('bytes', -bytes)
  return true
end

local function has_fields(id) return redis.call('TYPE', traj(id)).ok == 'hash' end
local function is_whole(id) return has_fields(id) and redis.call('TYPE', payload(id)).ok == 'string' end

-- Count a buffered trajectory as lost, and delete what is left of it.
local function count_as_lost(id)
  remove_from_buffer(id)
  redis.call('UNLINK', traj(id), payload(id))
  count('lost', 1)
end

local function end_lease(ticket)
  redis.call('ZREM', key('lease'), ticket)
  redis.call('HDEL', key('owner'), ticket)
  redis.call('ZREM', key('leased_at'), ticket)
  redis.call('HDEL', key('hedged'), ticket)
end

-- Whether a ticket's group takes trajectories.
local function is_open(ticket)
  return redis.call('ZSCORE', key('lease'), ticket) or redis.call('ZSCORE', key('requeue'), ticket)
end

local function lacking_of(ticket) return tonumber(redis.call('HGET', key('incomplete'), ticket)) or 0 end

-- Record that a closed group lacks `lacking` trajectories; 0 if it is open or complete.
local function mark_incomplete(ticket, lacking)
  local before = lacking_of(ticket)
  if lacking > 0 then
    redis.call('HSET', key('incomplete'), ticket, lacking)
  else
    redis.call('HDEL', key('incomplete'), ticket)
  end
  count('incomplete_groups', math.min(lacking, 1) - math.min(before, 1))
  count('failed_rollouts', lacking - before)
end

-- Close a group, complete or not. Its attempts are kept until a learner has claimed it.
local function close_group(ticket)
  end_lease(ticket)
  redis.call('ZREM', key('requeue'), ticket)
  redis.call('HDEL', key('groups'), ticket)
  redis.call('ZADD', key('ready'), ticket, ticket)
end

-- Requeue a ticket from any place: the next worker runs the rollouts that its group lacks.
local function requeue(ticket)
  end_lease(ticket)
  mark_incomplete(ticket, 0)
  local lacking = #missing(ticket)
  if lacking == 0 then return close_group(ticket) end
  redis.call('ZREM', key('ready'), ticket)
  redis.call('HSET', key('groups'), ticket, group_size(ticket) - lacking)
  redis.call('ZADD', key('requeue'), ticket, ticket)
  tell()
end

-- The worker of a lease has given it up: the worker that hedges it gets the lease. Without one it is requeued.
local function pass_on(ticket)
  local hedger = redis.call('HGET', key('hedged'), ticket)
  if not hedger then return requeue(ticket) end
  redis.call('HSET', key('owner'), ticket, hedger)
  redis.call('ZADD', key('lease'), now() + run.lease_ms, ticket)
  redis.call('HDEL', key('hedged'), ticket)
end

-- Record a failed attempt at a ticket: pass it on, or close its group incomplete after the last attempt.
local function fail_attempt(ticket)
  if redis.call('HINCRBY', key('attempts'), ticket, 1) < run.max_attempts then
    pass_on(ticket)
    count('requeued', 1)
  else
    close_group(ticket)
    mark_incomplete(ticket, #missing(ticket))
  end
end

-- No pool is of this step or a later one; `step` is where the caller's own knowledge ends. Pools follow each other
-- without gaps, but for those that a take-over has dissolved: they lie below `pools_end`.
local function end_of_pools(step)
  step = math.max(step, run.pools_end or 0)
  while redis.call('EXISTS', pool_info_key(step)) == 1 do step = step + 1 end
  return step
end

-- Delete all keys of the pool of a step. If its groups come `again`, they keep their sizes, and are not incomplete.
local function forget_pool(step, again)
  for ticket in string.gmatch(redis.call('HGET', pool_info_key(step), 'tickets') or '', '%d+') do
    for _, id in ipairs(slots_of(ticket)) do redis.call('UNLINK', traj(id), payload(id)) end
    if again then
      mark_incomplete(ticket, 0)
    else
      for _, name in ipairs({'sizes', 'incomplete'}) do redis.call('HDEL', key(name), ticket) end
    end
  end
  redis.call('UNLINK', pool_key(step), pool_info_key(step))
end
