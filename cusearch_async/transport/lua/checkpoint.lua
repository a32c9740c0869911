-- Forget the pools before `step`: every kept checkpoint contains these steps.
-- ARGV epoch step
local refused = refusal_of(ARGV[1])
if refused then return refused end
local step = tonumber(ARGV[2])
for s = run.checkpoint, step - 1 do forget_pool(s) end
redis.call('ZREMRANGEBYSCORE', key('taken'), '-inf', (step - run.defer - 1) * run.questions - 1)
if step > run.checkpoint then redis.call('HSET', state, 'checkpoint', step) end
return 1
