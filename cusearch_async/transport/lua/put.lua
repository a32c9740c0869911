-- Store finished trajectories in the buckets of their depths; close a group when its last one comes. Their payloads
-- were SET under names of their own just before: a rename takes no copy of them, an argument would take several.
-- Idempotent per (ticket, rollout): the same bytes again are stored already.
-- ARGV rollouts questions limit limit_bytes put...
--      put: msgpack of {id, staged, depth, version, bytes, {field, value, ...}}
-- Returns for each put: stored | duplicate (another is there already) | late (its group is closed, or has no such
-- place) | full (try again later).
local rollouts, questions = tonumber(ARGV[1]), tonumber(ARGV[2])
local limit, limit_bytes = tonumber(ARGV[3]), tonumber(ARGV[4])

local function refusal(id, ticket, size, staged)
  if redis.call('EXISTS', traj(id)) == 1 then
    if redis.call('GET', payload(id)) == redis.call('GET', staged) then return 'stored' end
    count('duplicates_refused', 1)
    return 'duplicate'
  end
  local is_open = redis.call('ZSCORE', key('lease'), ticket) or redis.call('ZSCORE', key('requeue'), ticket)
  if not is_open or tonumber(string.match(id, '%d+$')) >= size then
    count('late_refused', 1)
    return 'late'
  end
  local held = redis.call('HMGET', key('ledger'), 'buffered', 'bytes')
  local is_full = tonumber(held[1] or '0') >= limit or tonumber(held[2] or '0') >= limit_bytes
  if is_full and tonumber(ticket) >= (of_state('step', '0') + 1) * questions then return 'full' end
end

local puts = {}
for i = 5, #ARGV do
  local put = cmsgpack.unpack(ARGV[i])
  put[2] = key('staged:' .. put[2])
  if redis.call('EXISTS', put[2]) == 0 then return redis.error_reply('STAGED payload of ' .. put[1] .. ' is gone') end
  puts[#puts + 1] = put
end
local outcomes, finished = {}, 0
for i, put in ipairs(puts) do
  local id, staged, depth, version, bytes, fields = unpack(put)
  local ticket = string.match(id, '^%d+')
  local size = group_size(ticket, rollouts)
  local refused = refusal(id, ticket, size, staged)
  outcomes[i] = refused or 'stored'
  if refused then
    redis.call('UNLINK', staged)
  else
    redis.call('RENAME', staged, payload(id))
    redis.call('PERSIST', payload(id))
    redis.call('HSET', traj(id), 'state', 'buffered', unpack(fields))
    wait_in_bucket(id, depth, version, bytes, 1)
    finished = finished + 1
    if redis.call('HINCRBY', key('groups'), ticket, 1) == size then close_group(ticket) end
  end
end
count('finished', finished)
return outcomes
