-- Grant rollouts to a worker: lease tickets below the staleness limit, requeued ones first.
-- Repeating a request with the same token gives the same grant again, so a resent command does no harm.
-- KEYS state lease owner requeue ledger worker sizes
-- ARGV worker token room lease_ms loaded_version max_staleness questions rollouts prefix
-- Returns rollout ids "ticket:rollout", at most `room`; a group is never split.
local state, lease, owner, requeue, ledger, worker, sizes = unpack(KEYS)
local name, token, prefix = ARGV[1], ARGV[2], ARGV[9]
local room, lease_ms, loaded = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local max_staleness, questions, rollouts = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])

local function missing(ticket)
  local ids = {}
  for rollout = 0, (tonumber(redis.call('HGET', sizes, ticket)) or rollouts) - 1 do
    local id = ticket .. ':' .. rollout
    if redis.call('EXISTS', prefix .. 'traj:' .. id) == 0 then ids[#ids + 1] = id end
  end
  return ids
end

local granted = {}
local function grant(ids)
  for _, id in ipairs(ids) do granted[#granted + 1] = id end
end

if redis.call('HGET', worker, 'admit_token') == token then
  for ticket in string.gmatch(redis.call('HGET', worker, 'admit_tickets'), '%d+') do
    if redis.call('HGET', owner, ticket) == name then grant(missing(ticket)) end
  end
  return granted
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

for _, ticket in ipairs(redis.call('ZRANGEBYSCORE', lease, '-inf', now, 'LIMIT', 0, 1000)) do
  redis.call('ZREM', lease, ticket)
  redis.call('HDEL', owner, ticket)
  redis.call('ZADD', requeue, ticket, ticket)
  redis.call('HINCRBY', ledger, 'requeued', 1)
end

local published = tonumber(redis.call('HGET', state, 'published') or '-1')
if published < 0 then return granted end
local limit = (max_staleness + math.min(loaded, published) + 1) * questions

local tickets = {}
local function take(ticket)
  local ids = missing(ticket)
  if #granted + #ids > room then return false end
  tickets[#tickets + 1] = ticket
  redis.call('ZADD', lease, now + lease_ms, ticket)
  redis.call('HSET', owner, ticket, name)
  grant(ids)
  return true
end

local has_room = true
for _, ticket in ipairs(redis.call('ZRANGEBYSCORE', requeue, '-inf', '(' .. limit, 'LIMIT', 0, room)) do
  has_room = has_room and take(ticket)
  if not has_room then break end
  redis.call('ZREM', requeue, ticket)
end
local next_ticket = tonumber(redis.call('HGET', state, 'next_ticket') or '0')
while has_room and next_ticket < limit and take(tostring(next_ticket)) do
  next_ticket = next_ticket + 1
end
redis.call('HSET', state, 'next_ticket', next_ticket)
redis.call('HSET', worker, 'admit_token', token, 'admit_tickets', table.concat(tickets, ','))
return granted
