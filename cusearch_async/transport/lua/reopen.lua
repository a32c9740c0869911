-- An operator puts a leased ticket, or a waiting group that closed short, back in the queue.
-- ARGV ticket rollouts   Returns 1, or 0 when it is neither.
local ticket = ARGV[1]
if redis.call('ZSCORE', key('lease'), ticket) then
  end_lease(ticket)
elseif redis.call('ZSCORE', key('ready'), ticket) and redis.call('HEXISTS', key('incomplete'), ticket) == 1 then
  local lacking = tonumber(redis.call('HGET', key('incomplete'), ticket))
  redis.call('ZREM', key('ready'), ticket)
  redis.call('HDEL', key('incomplete'), ticket)
  count('incomplete_groups', -1)
  count('failed_rollouts', -lacking)
  local usual = tonumber(ARGV[2])
  redis.call('HSET', key('groups'), ticket, group_size(ticket, usual) - #missing(ticket, usual))
else
  return 0
end
redis.call('ZADD', key('requeue'), ticket, ticket)
return 1
