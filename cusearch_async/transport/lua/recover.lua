-- A learner takes over at `step` with what its method remembered at the checkpoint. Pools trained after it are
-- claimed again, so the same steps will get the same pools. Returns the new epoch; every older learner is fenced off.
-- Delivered again, however late, it changes nothing: its nonce has an epoch already.
-- ARGV step questions memory(JSON: phase, visits, sizes) nonce least_epoch
local step, questions, memory = tonumber(ARGV[1]), tonumber(ARGV[2]), cjson.decode(ARGV[3])
local given = redis.call('HGET', key('learners'), ARGV[4])
if given then return tonumber(given) end
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
redis.call('SET', key('next_ticket'), math.max(next_ticket_of(), step * questions))
local epoch = math.max(of_state('epoch', '0'), tonumber(ARGV[5])) + 1
redis.call('HSET', state, 'step', step, 'version', step, 'phase', memory.phase, 'checkpoint', forgotten,
           'epoch', epoch)
redis.call('HSET', key('learners'), ARGV[4], epoch)
return epoch
