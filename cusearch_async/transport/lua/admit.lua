-- Grant rollouts to a worker: lease tickets below the staleness limit, requeued ones first.
-- Repeating a request with the same token gives the same grant again, so a resent command does no harm.
-- ARGV worker token room lease_ms loaded_version max_staleness questions rollouts max_attempts
-- Returns rollout ids "ticket:rollout", at most `room`; a group is never split.
local name, token, room, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local loaded, max_staleness, questions = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local rollouts, max_attempts = tonumber(ARGV[8]), tonumber(ARGV[9])
local worker = key('worker:' .. name)

local granted = {}
local function grant(ids)
  for _, id in ipairs(ids) do granted[#granted + 1] = id end
end

if redis.call('HGET', worker, 'admit_token') == token then
  for ticket in string.gmatch(redis.call('HGET', worker, 'admit_tickets'), '%d+') do
    if redis.call('HGET', key('owner'), ticket) == name then grant(missing(ticket, rollouts)) end
  end
  return granted
end

local time = now()
for _, ticket in ipairs(redis.call('ZRANGEBYSCORE', key('lease'), '-inf', time, 'LIMIT', 0, 1000)) do
  fail_attempt(ticket, max_attempts, rollouts)
end

local published = of_state('published', '-1')
if published < 0 or of_state('paused', '0') == 1 then return granted end
local limit = (max_staleness + math.min(loaded, published) + 1) * questions

local tickets = {}
local function take(ticket)
  local ids = missing(ticket, rollouts)
  if #granted + #ids > room then return false end
  tickets[#tickets + 1] = ticket
  redis.call('ZADD', key('lease'), time + lease_ms, ticket)
  redis.call('HSET', key('owner'), ticket, name)
  grant(ids)
  return true
end

local has_room = true
for _, ticket in ipairs(redis.call('ZRANGEBYSCORE', key('requeue'), '-inf', '(' .. limit, 'LIMIT', 0, room)) do
  has_room = take(ticket)
  if not has_room then break end
  redis.call('ZREM', key('requeue'), ticket)
end
local next_ticket = next_ticket_of()
while has_room and next_ticket < limit and take(tostring(next_ticket)) do
  next_ticket = next_ticket + 1
end
redis.call('SET', key('next_ticket'), next_ticket)
redis.call('HSET', worker, 'admit_token', token, 'admit_tickets', table.concat(tickets, ','))
return granted
