-- A learner takes over at `step` with what its method remembered at the checkpoint. Pools trained after it are
-- claimed again, so the same steps will get the same pools. Returns the new epoch; every older learner is fenced off.
-- KEYS state ledger visits sizes   ARGV step questions prefix memory(JSON: phase, visits, sizes)
local state, ledger, visits, sizes = unpack(KEYS)
local prefix, memory = ARGV[3], cjson.decode(ARGV[4])
local step, questions = tonumber(ARGV[1]), tonumber(ARGV[2])
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
redis.call('UNLINK', visits)
for question, history in pairs(memory.visits) do redis.call('HSET', visits, question, history) end
for ticket, size in pairs(memory.sizes) do redis.call('HSETNX', sizes, ticket, size) end
local next_ticket = tonumber(redis.call('HGET', state, 'next_ticket') or '0')
redis.call('HSET', state, 'step', step, 'version', step, 'phase', memory.phase,
           'checkpoint', math.max(forgotten, 0), 'next_ticket', math.max(next_ticket, step * questions))
return redis.call('HINCRBY', state, 'epoch', 1)
