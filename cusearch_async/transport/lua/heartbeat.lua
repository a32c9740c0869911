-- Say that a worker lives, renew its leases, publish what it says of itself. Workers that have been silent for an hour
-- are forgotten.
-- ARGV worker number_of_tickets ticket... field value...
local name, tickets = ARGV[1], tonumber(ARGV[2])
if not run.epoch then return 0 end
local worker, time, wall = key('worker:' .. name), now()
redis.call('ZADD', key('workers'), wall, name)
redis.call('ZREMRANGEBYSCORE', key('workers'), '-inf', wall - 3600000)
for i = 3, 2 + tickets do
  if redis.call('HGET', key('owner'), ARGV[i]) == name then
    redis.call('ZADD', key('lease'), 'XX', time + run.lease_ms, ARGV[i])
  end
end
for i = 3 + tickets, #ARGV, 2 do redis.call('HSET', worker, ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', worker, 3600)
return 1
