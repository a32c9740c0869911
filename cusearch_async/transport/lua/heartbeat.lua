-- Say that a worker lives, renew its leases, publish what it says of itself.
-- KEYS workers worker lease owner
-- ARGV worker lease_ms number_of_tickets ticket... field value...
local workers, worker, lease, owner = unpack(KEYS)
local name, lease_ms, count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', workers, now, name)
for i = 4, 3 + count do
  if redis.call('HGET', owner, ARGV[i]) == name then
    redis.call('ZADD', lease, 'XX', now + lease_ms, ARGV[i])
  end
end
for i = 4 + count, #ARGV, 2 do redis.call('HSET', worker, ARGV[i], ARGV[i + 1]) end
return now
