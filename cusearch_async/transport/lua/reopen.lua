-- An operator requeues a leased ticket, or a ready group that is incomplete. The count of its attempts starts again.
-- ARGV ticket   Returns 1, or 0 when it is neither.
local ticket = ARGV[1]
local is_incomplete = redis.call('ZSCORE', key('ready'), ticket) and redis.call('HEXISTS', key('incomplete'), ticket) == 1
if not is_incomplete and not redis.call('ZSCORE', key('lease'), ticket) then return 0 end
redis.call('HDEL', key('attempts'), ticket)
requeue(ticket)
return 1
