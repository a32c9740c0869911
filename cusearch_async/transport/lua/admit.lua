-- Grant rollouts to a worker: lease tickets within the staleness bound and the steps of the run, requeued ones
-- first. With room left it hedges: what another worker was granted long ago, and lacks, is granted a second time if its
-- pool is near; and once more when that is long ago, too.
-- A request with the same token gets the same grant again, without tickets that are now beyond the limit. An older
-- request of the same process gets nothing. So a command that is sent again, or arrives late, changes nothing.
-- ARGV worker token("process/number") room loaded_version joined
-- Returns rollout ids "ticket:rollout", at most `room`; a group is never split.
local name, token, room, loaded = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local worker = key('worker:' .. name)
if not run.epoch then return {} end
local refused = contract_refusal(ARGV[5]) or without_limits()
if refused then return refused end
local published = run.published or -1
if published < 0 then return {} end
local pools = run.max_staleness + math.min(loaded, published) + 1
if by_tickets then pools = math.min(pools, run.steps) end
local limit = pools * run.questions
local most = (run.max_staleness + 2) * run.questions  -- tickets of one request: workers write the lists below

local granted = {}
local function grant(ids)
  for _, id in ipairs(ids) do granted[#granted + 1] = id end
end

if redis.call('HGET', worker, 'admit_token') == token then
  for ticket in string.gmatch(string.sub(redis.call('HGET', worker, 'admit_tickets'), 1, 16 * most), '%d+') do
    if redis.call('HGET', key('owner'), ticket) == name then
      if tonumber(ticket) < limit then grant(missing(ticket)) else requeue(ticket) end
    elseif redis.call('HGET', key('hedged'), ticket) == name and tonumber(ticket) < limit then
      grant(missing(ticket))
    end
  end
  return granted
end
if is_overtaken(worker, token) then return {} end

local time = now()
for _, ticket in ipairs(redis.call('ZRANGEBYSCORE', key('lease'), '-inf', time, 'LIMIT', 0, 1000)) do
  fail_attempt(ticket)
end
if run.paused == 1 then room = 0 end
local next_ticket = natural(redis.call('GET', key('next_ticket')))
if not next_ticket then return lost('next_ticket is gone') end

local tickets = {}
local function take(ticket)
  local ids = missing(ticket)
  if #granted + #ids > room then return false end
  tickets[#tickets + 1] = ticket
  redis.call('ZADD', key('lease'), time + run.lease_ms, ticket)
  redis.call('HSET', key('owner'), ticket, name)
  redis.call('ZADD', key('leased_at'), time, ticket)
  grant(ids)
  return true
end

local has_room = room > 0
for _, ticket in ipairs(redis.call('ZRANGEBYSCORE', key('requeue'), '-inf', '(' .. limit, 'LIMIT', 0, math.min(room, most))) do
  has_room = take(ticket)
  if not has_room then break end
  redis.call('ZREM', key('requeue'), ticket)
end
while has_room and next_ticket < limit do
  has_room = take(tostring(next_ticket))
  if has_room then next_ticket = next_ticket + 1 end
end
if has_room and run.hedge_s > 0 then
  local needed_soon, old = math.min(limit, (run.step + run.defer + 2) * run.questions), {}
  for _, ticket in ipairs(redis.call('ZRANGEBYSCORE', key('leased_at'), '-inf', time - 1000 * run.hedge_s)) do
    local runs_it = redis.call('HGET', key('owner'), ticket) == name or redis.call('HGET', key('hedged'), ticket) == name
    if tonumber(ticket) < needed_soon and not runs_it then old[#old + 1] = tonumber(ticket) end
  end
  table.sort(old)
  for i = 1, math.min(#old, most - #tickets) do
    local ticket = tostring(old[i])
    local ids = missing(ticket)
    if #granted + #ids > room then break end
    tickets[#tickets + 1] = ticket
    redis.call('HSET', key('hedged'), ticket, name)
    redis.call('ZADD', key('leased_at'), time, ticket)
    count('hedged_rollouts', #ids)
    grant(ids)
  end
end
redis.call('SET', key('next_ticket'), next_ticket)
redis.call('HSET', worker, 'admit_token', token, 'admit_tickets', table.concat(tickets, ','))
redis.call('EXPIRE', worker, 3600)
return granted
