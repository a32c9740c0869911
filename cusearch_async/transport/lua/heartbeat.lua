-- Record that a worker is alive, renew its leases, and store its status. Workers without a heartbeat for an hour are
-- removed, and those from a time when the server's clock was ahead. Returns those of the tickets whose groups are closed.
-- ARGV worker joined ahead_ms number_of_tickets ticket... field value...
local name, tickets = ARGV[1], tonumber(ARGV[4])
if not run.epoch then return {} end
local refused = contract_refusal(ARGV[2]) or without_limits()
if refused then return refused end
local worker, time, wall = key('worker:' .. name), now()
local closed = {}
redis.call('ZADD', key('workers'), wall, name)
redis.call('ZREMRANGEBYSCORE', key('workers'), '-inf', wall - 3600000)
redis.call('ZREMRANGEBYSCORE', key('workers'), wall + ARGV[3], '+inf')
for i = 5, 4 + tickets do
  if redis.call('HGET', key('owner'), ARGV[i]) == name then
    redis.call('ZADD', key('lease'), 'XX', time + run.lease_ms, ARGV[i])
  elseif not is_open(ARGV[i]) then
    closed[#closed + 1] = ARGV[i]
  end
end
for i = 5 + tickets, #ARGV, 2 do redis.call('HSET', worker, ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', worker, 3600)
return closed
