-- A learner takes over at `step` with the phase of its checkpoint. Pools trained after it are claimed again,
-- so the same steps will get the same pools. Returns the new epoch; every older learner is fenced off.
-- KEYS state ledger   ARGV step phase questions prefix
local state, ledger, prefix = KEYS[1], KEYS[2], ARGV[4]
local step, questions = tonumber(ARGV[1]), tonumber(ARGV[3])
local forgotten = tonumber(redis.call('HGET', state, 'checkpoint') or '0')
if step < forgotten then
  return redis.error_reply('GONE ' .. forgotten)
end
local reached = tonumber(redis.call('HGET', state, 'step') or tostring(step))
for s = step, reached - 1 do
  for _, id in ipairs(redis.call('LRANGE', prefix .. 'pool:' .. s, 0, -1)) do
    local key = prefix .. 'traj:' .. id
    redis.call('HINCRBY', ledger, redis.call('HGET', key, 'state'), -1)
    redis.call('HINCRBY', ledger, 'claimed', 1)
    redis.call('HSET', key, 'state', 'claimed')
  end
end
local next_ticket = tonumber(redis.call('HGET', state, 'next_ticket') or '0')
redis.call('HSET', state, 'step', step, 'version', step, 'phase', ARGV[2],
           'checkpoint', math.max(forgotten, 0), 'next_ticket', math.max(next_ticket, step * questions))
return redis.call('HINCRBY', state, 'epoch', 1)
