-- Record that the learner is alive, or that it has ended (ttl_ms 0). The record expires without a new heartbeat.
-- ARGV epoch ttl_ms field value...
local refused = refusal_of(ARGV[1])
if refused then return refused end
redis.call('UNLINK', key('learner'))
for i = 3, #ARGV, 2 do redis.call('HSET', key('learner'), ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', key('learner'), ARGV[2])
return 1
