-- A worker gives tickets back, because an attempt failed or because it leaves.
-- ARGV worker failed max_attempts rollouts leaves ticket...
local name, failed, leaves = ARGV[1], ARGV[2] == '1', ARGV[5] == '1'
for i = 6, #ARGV do
  if redis.call('HGET', key('owner'), ARGV[i]) == name then
    if failed then
      fail_attempt(ARGV[i], tonumber(ARGV[3]), tonumber(ARGV[4]))
    else
      end_lease(ARGV[i])
      redis.call('ZADD', key('requeue'), ARGV[i], ARGV[i])
    end
  end
end
if leaves then
  redis.call('ZREM', key('workers'), name)
  redis.call('UNLINK', key('worker:' .. name))
end
return 1
