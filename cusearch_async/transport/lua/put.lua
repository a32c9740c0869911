-- Store finished trajectories in the buckets of their depths; close a group with its last one. Their payloads were SET
-- under temporary names just before: a rename makes no copy of them, an argument would be copied several times.
-- Idempotent per (ticket, rollout): the same bytes again give 'stored'.
-- ARGV joined put...
--      put: msgpack of {id, staged, depth, version, bytes, {field, value, ...}}
-- Returns for each put: stored | duplicate (another trajectory has this id) | late (its group is closed, or has no such
-- slot) | full (try again later) | unstaged (its payload has disappeared: send it again).
local kept_for_step = {}  -- tickets of the pool that the learner waits for, where they are known
for ticket in string.gmatch(deferred and redis.call('HGET', key('reserved'), run.step or 0) or '', '%d+') do
  kept_for_step[ticket] = true
end

local function refusal(id, ticket, size, staged)
  if redis.call('EXISTS', staged) == 0 then return 'unstaged' end
  if not run.epoch then return 'late' end
  local is_known = redis.call('HEXISTS', key('waiting'), id) == 1
  if is_known or (not is_open(ticket) and redis.call('EXISTS', traj(id)) == 1) then
    if redis.call('GET', payload(id)) == redis.call('GET', staged) then return 'stored' end
    count('duplicates_refused', 1)
    return 'duplicate'
  end
  if not is_open(ticket) or tonumber(string.match(id, '%d+$')) >= size then
    count('late_refused', 1)
    return 'late'
  end
  local held = redis.call('HMGET', key('ledger'), 'buffered', 'bytes')
  local is_full = tonumber(held[1] or '0') >= run.limit or tonumber(held[2] or '0') >= run.limit_bytes
  local is_needed = tonumber(ticket) < (run.step + 1) * run.questions or kept_for_step[ticket]
  if is_full and not is_needed then return 'full' end
end

local another_contract = run.epoch and (contract_refusal(ARGV[1]) or without_limits())
if another_contract then
  for i = 2, #ARGV do redis.call('UNLINK', key('staged:' .. cmsgpack.unpack(ARGV[i])[2])) end
  return another_contract
end

local outcomes, finished = {}, 0
for i = 2, #ARGV do
  local id, staged, depth, version, bytes, fields = unpack(cmsgpack.unpack(ARGV[i]))
  staged = key('staged:' .. staged)
  local ticket = ticket_of(id)
  local size = group_size(ticket)
  local refused = refusal(id, ticket, size, staged)
  outcomes[i - 1] = refused or 'stored'
  if refused then
    redis.call('UNLINK', staged)
  else
    redis.call('RENAME', staged, payload(id))
    redis.call('PERSIST', payload(id))
    redis.call('HSET', traj(id), 'state', 'buffered', unpack(fields))
    add_to_buffer(id, depth, version, bytes)
    finished = finished + 1
    if redis.call('HINCRBY', key('groups'), ticket, 1) == size then close_group(ticket) end
  end
end
count('finished', finished)
return outcomes
