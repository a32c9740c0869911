-- An operator requeues a leased ticket, or a ready group that is incomplete. The count of its attempts starts again.
-- One that comes again within ten minutes, with its token, was done.
-- ARGV ticket token   Returns 1, or 0 when it is neither.
local ticket, answered = ARGV[1], key('answered:' .. ARGV[2])
if without_limits() then return without_limits() end
if redis.call('GET', answered) then return 1 end
local is_incomplete = redis.call('ZSCORE', key('ready'), ticket) and redis.call('HEXISTS', key('incomplete'), ticket) == 1
if not is_incomplete and not redis.call('ZSCORE', key('lease'), ticket) then return 0 end
redis.call('SET', answered, 1, 'EX', 600)
redis.call('HDEL', key('attempts'), ticket)
requeue(ticket)
return 1
