-- Forget the pools before `step`: every step before it is safe in a checkpoint.
-- ARGV epoch step
if is_fenced(ARGV[1]) then return redis.error_reply('FENCED') end
local from, step = of_state('checkpoint', '0'), tonumber(ARGV[2])
for s = from, step - 1 do
  for _, id in ipairs(redis.call('LRANGE', key('pool:' .. s), 0, -1)) do
    local ticket = string.match(id, '^%d+')
    redis.call('UNLINK', traj(id), payload(id))
    redis.call('HDEL', key('sizes'), ticket)
    redis.call('HDEL', key('incomplete'), ticket)
  end
  redis.call('UNLINK', key('pool:' .. s))
end
if step > from then redis.call('HSET', state, 'checkpoint', step) end
return 1
