-- Put before every script. KEYS[1] is the run's state; every other key of the run shares its hash tag.
local state = KEYS[1]
local prefix = string.sub(state, 1, -6)
local function key(name) return prefix .. name end
local function traj(id) return prefix .. 'traj:' .. id end
local function payload(id) return prefix .. 'payload:' .. id end
local function count(name, by) redis.call('HINCRBY', key('ledger'), name, by) end
local function of_state(name, default) return tonumber(redis.call('HGET', state, name) or default) end
local function next_ticket_of() return tonumber(redis.call('GET', key('next_ticket')) or '0') end
local function is_fenced(epoch) return redis.call('HGET', state, 'epoch') ~= epoch end
local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function group_size(ticket, usual) return tonumber(redis.call('HGET', key('sizes'), ticket)) or usual end

-- Rollouts of a ticket that are not in the buffer.
local function missing(ticket, usual)
  local ids = {}
  for rollout = 0, group_size(ticket, usual) - 1 do
    local id = ticket .. ':' .. rollout
    if redis.call('EXISTS', traj(id)) == 0 then ids[#ids + 1] = id end
  end
  return ids
end

-- One trajectory more (1) or less (-1) waits in the buffer.
local function wait_in_bucket(id, depth, version, bytes, by)
  if by > 0 then
    redis.call('ZADD', key('depth:' .. depth), string.match(id, '^%d+'), id)
  else
    redis.call('ZREM', key('depth:' .. depth), id)
  end
  local field = depth .. ':' .. version
  if redis.call('HINCRBY', key('heat'), field, by) <= 0 then redis.call('HDEL', key('heat'), field) end
  count('buffered', by)
  count('bytes', by * bytes)
end

-- Nobody works on the ticket any more.
local function end_lease(ticket)
  redis.call('ZREM', key('lease'), ticket)
  redis.call('HDEL', key('owner'), ticket)
end

-- The group is finished, or will get no more.
local function close_group(ticket)
  end_lease(ticket)
  redis.call('ZREM', key('requeue'), ticket)
  redis.call('HDEL', key('groups'), ticket)
  redis.call('HDEL', key('attempts'), ticket)
  redis.call('ZADD', key('ready'), ticket, ticket)
end

-- An attempt at the ticket has failed: the next one, or its group closes short after the last.
local function fail_attempt(ticket, max_attempts, usual)
  end_lease(ticket)
  if redis.call('HINCRBY', key('attempts'), ticket, 1) < max_attempts then
    redis.call('ZADD', key('requeue'), ticket, ticket)
    count('requeued', 1)
    return
  end
  local lacking = #missing(ticket, usual)
  close_group(ticket)
  redis.call('HSET', key('incomplete'), ticket, lacking)
  count('incomplete_groups', 1)
  count('failed_rollouts', lacking)
end
