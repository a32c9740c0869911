-- Store one finished trajectory in the bucket of its depth; close its group when it is the last one.
-- Idempotent per (ticket, rollout).
-- KEYS state lease owner requeue groups ready ledger depth trajectory sizes
-- ARGV ticket id rollouts questions limit payload field value...
-- Returns stored | duplicate (is there already) | late (its group is closed) | full (try again later).
local state, lease, owner, requeue, groups, ready, ledger, depth, trajectory, sizes = unpack(KEYS)
local ticket, id = ARGV[1], ARGV[2]
local rollouts = tonumber(redis.call('HGET', sizes, ticket)) or tonumber(ARGV[3])
local questions, limit, payload = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]

if redis.call('EXISTS', trajectory) == 1 then
  redis.call('HINCRBY', ledger, 'duplicates_refused', 1)
  return 'duplicate'
end
if not (redis.call('ZSCORE', lease, ticket) or redis.call('ZSCORE', requeue, ticket)) then
  redis.call('HINCRBY', ledger, 'late_refused', 1)
  return 'late'
end
local step = tonumber(redis.call('HGET', state, 'step') or '0')
local buffered = tonumber(redis.call('HGET', ledger, 'buffered') or '0')
if buffered >= limit and tonumber(ticket) >= (step + 1) * questions then return 'full' end

redis.call('HSET', trajectory, 'state', 'buffered', 'payload', payload, unpack(ARGV, 7))
redis.call('ZADD', depth, ticket, id)
redis.call('HINCRBY', ledger, 'finished', 1)
redis.call('HINCRBY', ledger, 'buffered', 1)
if redis.call('HINCRBY', groups, ticket, 1) == rollouts then
  redis.call('HDEL', groups, ticket)
  redis.call('ZREM', lease, ticket)
  redis.call('ZREM', requeue, ticket)
  redis.call('HDEL', owner, ticket)
  redis.call('ZADD', ready, ticket, ticket)
end
return 'stored'
