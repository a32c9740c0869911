-- Forget the pools before `step`: every step before it is safe in a checkpoint.
-- KEYS state sizes   ARGV epoch step prefix
local state, sizes, prefix = KEYS[1], KEYS[2], ARGV[3]
if redis.call('HGET', state, 'epoch') ~= ARGV[1] then return redis.error_reply('FENCED') end
local from = tonumber(redis.call('HGET', state, 'checkpoint') or '0')
for step = from, tonumber(ARGV[2]) - 1 do
  for _, id in ipairs(redis.call('LRANGE', prefix .. 'pool:' .. step, 0, -1)) do
    redis.call('UNLINK', prefix .. 'traj:' .. id)
    redis.call('HDEL', sizes, string.match(id, '^%d+'))
  end
  redis.call('UNLINK', prefix .. 'pool:' .. step)
end
redis.call('HSET', state, 'checkpoint', math.max(from, tonumber(ARGV[2])))
return 1
