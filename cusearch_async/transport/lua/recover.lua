-- A learner takes over at `step` with what its method remembered at the checkpoint. Pools trained after it are
-- claimed again, so the same steps will get the same pools. Returns the new epoch; every older learner is fenced off.
-- ARGV step questions memory(JSON: phase, visits, sizes)
local step, questions, memory = tonumber(ARGV[1]), tonumber(ARGV[2]), cjson.decode(ARGV[3])
local forgotten = of_state('checkpoint', '0')
if step < forgotten then return redis.error_reply('GONE ' .. forgotten) end
local reached = of_state('step', tostring(step))
for s = step, reached - 1 do
  for _, id in ipairs(redis.call('LRANGE', key('pool:' .. s), 0, -1)) do
    count(redis.call('HGET', traj(id), 'state'), -1)
    count('claimed', 1)
    redis.call('HSET', traj(id), 'state', 'claimed')
  end
end
redis.call('UNLINK', key('visits'))
for question, history in pairs(memory.visits) do redis.call('HSET', key('visits'), question, history) end
for ticket, size in pairs(memory.sizes) do redis.call('HSETNX', key('sizes'), ticket, size) end
local next_ticket = math.max(of_state('next_ticket', '0'), step * questions)
redis.call('HSET', state, 'step', step, 'version', step, 'phase', memory.phase, 'checkpoint', forgotten,
           'next_ticket', next_ticket)
return redis.call('HINCRBY', state, 'epoch', 1)
