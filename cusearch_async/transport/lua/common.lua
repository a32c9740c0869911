-- Put before every script. KEYS[1] is the run's state; every other key of the run shares its hash tag. What a script
-- must know of the run (group sizes, bounds, room) is what the learner has laid down in `limits`, never what a caller
-- says.
local state = KEYS[1]
local prefix = string.sub(state, 1, -6)
local function key(name) return prefix .. name end

local run = {}  -- the fields of `state` and of `limits`
for _, name in ipairs({state, key('limits')}) do
  local fields = redis.call('HGETALL', name)
  for i = 1, #fields, 2 do run[fields[i]] = tonumber(fields[i + 1]) or fields[i + 1] end
end

local function traj(id) return prefix .. 'traj:' .. id end
local function payload(id) return prefix .. 'payload:' .. id end
local function pool_key(step) return prefix .. 'pool:' .. step end
local function pool_info_key(step) return prefix .. 'pool:' .. step .. ':facts' end
local function count(name, by) if by ~= 0 then redis.call('HINCRBY', key('ledger'), name, by) end end
local function ticket_of(id) return string.match(id, '^%d+') end
local function lost(what) return redis.error_reply('LOST ' .. what) end

-- Why a learner of `epoch` must not go on: Redis has forgotten it, or another one has taken over. Else nothing.
local function refusal_of(epoch)
  if run.epoch == tonumber(epoch) then return nil end
  if not run.epoch then return lost('nothing of it is there') end
  if run.epoch < tonumber(epoch) then return lost('it knows learners up to epoch ' .. run.epoch .. ', this one has ' .. epoch) end
  return redis.error_reply('FENCED')
end

-- Why a process whose contract has this digest may not join: the run has another one, which the answer tells. Else
-- nothing.
local function contract_refusal(digest)
  if (redis.call('HGET', key('contract'), 'digest') or '') == digest then return nil end
  local terms, fields = {}, redis.call('HGETALL', key('contract'))
  for i = 1, #fields, 2 do
    if fields[i] ~= 'digest' then terms[fields[i]] = fields[i + 1] end
  end
  return redis.error_reply('CONTRACT ' .. cjson.encode(terms))
end

-- The run's clock, and the server's, in milliseconds. The run's follows the server's, by half a lease at most from one
-- call to the next: an outage, or a jump of the server's clock, ends no leases.
local function now()
  local time = redis.call('TIME')
  local wall = time[1] * 1000 + math.floor(time[2] / 1000)
  local last = redis.call('HMGET', key('clock'), 'wall', 'run')
  local passed = math.min(wall - (tonumber(last[1]) or wall), math.floor(run.lease_ms / 2))
  local clock = (tonumber(last[2]) or 0) + math.max(0, passed)
  redis.call('HSET', key('clock'), 'wall', wall, 'run', clock)
  return clock, wall
end

-- What the selection method remembers: its own text, and the fields of `state` that it wants seen.
local function save_method_state(method)
  redis.call('SET', key('memory'), method.memory)
  for name in string.gmatch(run.method_fields or '', '%S+') do redis.call('HDEL', state, name) end
  local names = {}
  for name, value in pairs(method.fields) do
    names[#names + 1] = name
    redis.call('HSET', state, name, value)
  end
  redis.call('HSET', state, 'method_fields', table.concat(names, ' '))
end

local function group_size(ticket) return tonumber(redis.call('HGET', key('sizes'), ticket)) or run.rollouts end

local function slots_of(ticket)
  local ids = {}
  for rollout = 0, group_size(ticket) - 1 do ids[rollout + 1] = ticket .. ':' .. rollout end
  return ids
end

-- Rollouts of a ticket that do not wait in the buffer.
local function missing(ticket)
  local ids, lacking = slots_of(ticket), {}
  local waiting = redis.call('HMGET', key('waiting'), unpack(ids))
  for i, id in ipairs(ids) do
    if not waiting[i] then lacking[#lacking + 1] = id end
  end
  return lacking
end

-- A trajectory waits in the buffer.
local function add_to_buffer(id, depth, version, bytes)
  redis.call('HSET', key('waiting'), id, depth .. ':' .. version .. ':' .. bytes)
  redis.call('ZADD', key('depth:' .. depth), ticket_of(id), id)
  redis.call('HINCRBY', key('depth_by_version'), depth .. ':' .. version, 1)
  count('buffered', 1)
  count('bytes', bytes)
end

-- It waits no more. Whether it did. Needs nothing of the trajectory itself, which may have gone.
local function remove_from_buffer(id)
  local known = redis.call('HGET', key('waiting'), id)
  if not known then return false end
  local cell, depth, bytes = string.match(known, '^((%d+):%-?%d+):(%d+)$')
  redis.call('HDEL', key('waiting'), id)
  redis.call('ZREM', key('depth:' .. depth), id)
  if redis.call('HINCRBY', key('depth_by_version'), cell, -1) <= 0 then redis.call('HDEL', key('depth_by_version'), cell) end
  count('buffered', -1)
  count('bytes', -bytes)
  return true
end

local function is_whole(id) return redis.call('EXISTS', traj(id), payload(id)) == 2 end

-- One that waited has gone from Redis, or is of no use any more.
local function count_as_lost(id)
  remove_from_buffer(id)
  redis.call('UNLINK', traj(id), payload(id))
  count('lost', 1)
end

-- Nobody works on the ticket any more.
local function end_lease(ticket)
  redis.call('ZREM', key('lease'), ticket)
  redis.call('HDEL', key('owner'), ticket)
end

-- The group waits without `lacking` of its trajectories; 0: it is not closed, or whole.
local function mark_incomplete(ticket, lacking)
  local before = tonumber(redis.call('HGET', key('incomplete'), ticket)) or 0
  if lacking > 0 then
    redis.call('HSET', key('incomplete'), ticket, lacking)
  else
    redis.call('HDEL', key('incomplete'), ticket)
  end
  count('incomplete_groups', math.min(lacking, 1) - math.min(before, 1))
  count('failed_rollouts', lacking - before)
end

-- The group is finished, or will get no more. Its attempts are remembered until a learner has taken it.
local function close_group(ticket)
  end_lease(ticket)
  redis.call('ZREM', key('requeue'), ticket)
  redis.call('HDEL', key('groups'), ticket)
  redis.call('ZADD', key('ready'), ticket, ticket)
end

-- Wherever the ticket is, what its group lacks is to be played by whoever asks next.
local function requeue(ticket)
  end_lease(ticket)
  mark_incomplete(ticket, 0)
  local lacking = #missing(ticket)
  if lacking == 0 then return close_group(ticket) end
  redis.call('ZREM', key('ready'), ticket)
  redis.call('HSET', key('groups'), ticket, group_size(ticket) - lacking)
  redis.call('ZADD', key('requeue'), ticket, ticket)
end

-- An attempt at the ticket has failed: the next one, or its group is closed incomplete after the last.
local function fail_attempt(ticket)
  if redis.call('HINCRBY', key('attempts'), ticket, 1) < run.max_attempts then
    requeue(ticket)
    count('requeued', 1)
  else
    close_group(ticket)
    mark_incomplete(ticket, #missing(ticket))
  end
end

-- Everything that Redis holds of the pool of a step.
local function forget_pool(step)
  for ticket in string.gmatch(redis.call('HGET', pool_info_key(step), 'tickets') or '', '%d+') do
    for _, id in ipairs(slots_of(ticket)) do redis.call('UNLINK', traj(id), payload(id)) end
    redis.call('HDEL', key('sizes'), ticket)
    redis.call('HDEL', key('incomplete'), ticket)
  end
  redis.call('UNLINK', pool_key(step), pool_info_key(step))
end
