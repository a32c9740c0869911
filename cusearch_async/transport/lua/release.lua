-- Release the tickets of a worker, because an attempt failed or because the worker leaves.
-- ARGV worker failed leaves ticket...
local name, failed, leaves = ARGV[1], ARGV[2] == '1', ARGV[3] == '1'
for i = 4, #ARGV do
  if redis.call('HGET', key('owner'), ARGV[i]) == name then
    if failed then fail_attempt(ARGV[i]) else requeue(ARGV[i]) end
  elseif not failed and redis.call('HGET', key('hedged'), ARGV[i]) == name then
    redis.call('HDEL', key('hedged'), ARGV[i])
    redis.call('ZADD', key('leased_at'), 'XX', '-inf', ARGV[i])  -- another worker may hedge it at once
  end
end
if leaves then
  redis.call('ZREM', key('workers'), name)
  redis.call('UNLINK', key('worker:' .. name))
end
return 1
