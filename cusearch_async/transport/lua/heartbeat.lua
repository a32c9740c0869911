-- Say that a worker lives, renew its leases, publish what it says of itself.
-- ARGV worker lease_ms number_of_tickets ticket... field value...
local name, lease_ms, tickets = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local time = now()
redis.call('ZADD', key('workers'), time, name)
for i = 4, 3 + tickets do
  if redis.call('HGET', key('owner'), ARGV[i]) == name then
    redis.call('ZADD', key('lease'), 'XX', time + lease_ms, ARGV[i])
  end
end
for i = 4 + tickets, #ARGV, 2 do redis.call('HSET', key('worker:' .. name), ARGV[i], ARGV[i + 1]) end
return 1
