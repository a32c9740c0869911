-- Store one finished trajectory in the bucket of its depth; close its group when it is the last one.
-- Idempotent per (ticket, rollout): the same bytes again are stored already.
-- ARGV id rollouts questions limit limit_bytes depth version payload fields(msgpack: name, value, name, ...)
-- Returns stored | duplicate (another is there already) | late (its group is closed, or has no such place) | full (try again later).
local id, depth, version, payload = ARGV[1], ARGV[6], ARGV[7], ARGV[8]
local ticket = string.match(id, '^%d+')

if redis.call('EXISTS', traj(id)) == 1 then
  if redis.call('HGET', traj(id), 'payload') == payload then return 'stored' end
  count('duplicates_refused', 1)
  return 'duplicate'
end
local size = group_size(ticket, tonumber(ARGV[2]))
local is_open = redis.call('ZSCORE', key('lease'), ticket) or redis.call('ZSCORE', key('requeue'), ticket)
if not is_open or tonumber(string.match(id, '%d+$')) >= size then
  count('late_refused', 1)
  return 'late'
end
local held = redis.call('HMGET', key('ledger'), 'buffered', 'bytes')
local is_full = tonumber(held[1] or '0') >= tonumber(ARGV[4]) or tonumber(held[2] or '0') >= tonumber(ARGV[5])
if is_full and tonumber(ticket) >= (of_state('step', '0') + 1) * tonumber(ARGV[3]) then return 'full' end

redis.call('HSET', traj(id), 'state', 'buffered', 'payload', payload, unpack(cmsgpack.unpack(ARGV[9])))
wait_in_bucket(id, depth, version, #payload, 1)
count('finished', 1)
if redis.call('HINCRBY', key('groups'), ticket, 1) == size then close_group(ticket) end
return 'stored'
