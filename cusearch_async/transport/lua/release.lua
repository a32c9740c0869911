-- Release the tickets of a worker, because an attempt failed or because the worker leaves.
-- One that arrives after a later request for tickets was sent again: it was done, and the tickets may be leased anew.
-- ARGV worker token("process/number") failed leaves ticket...
local name, failed, leaves = ARGV[1], ARGV[3] == '1', ARGV[4] == '1'
if without_limits() then return without_limits() end
if is_overtaken(key('worker:' .. name), ARGV[2]) then return 0 end
for i = 5, #ARGV do
  if redis.call('HGET', key('owner'), ARGV[i]) == name then
    if failed then fail_attempt(ARGV[i]) else pass_on(ARGV[i]) end
  elseif redis.call('HGET', key('hedged'), ARGV[i]) == name then
    redis.call('HDEL', key('hedged'), ARGV[i])
    if not failed then redis.call('ZADD', key('leased_at'), 'XX', '-inf', ARGV[i]) end  -- it may be hedged at once
  end
end
if leaves then
  redis.call('ZREM', key('workers'), name)
  redis.call('UNLINK', key('worker:' .. name))
end
return 1
