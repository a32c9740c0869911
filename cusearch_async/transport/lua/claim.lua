-- Claim the pool of a step: N groups, all or none. The learner looks at the groups, checks them, and takes them.
-- Trajectories that disappeared from Redis are counted as lost, and generated again if the pool is not taken yet.
-- ARGV epoch step action(look | take) id...
-- Returns nothing while the pool is not complete, else {status, {id that was lost...}, {id or ticket...}}:
--   waits  no longer complete: the listed tickets are requeued
--   found  complete; nothing is changed yet
--   kept   the step has taken this pool, now or before
local step, action = tonumber(ARGV[2]), ARGV[3]
local refused = refusal_of(ARGV[1])
if refused then return refused end
if step ~= run.step then return lost('it is at step ' .. run.step .. ', the learner at ' .. step) end

local gone = {}
if redis.call('EXISTS', pool_info_key(step)) == 1 then
  local ids, kept = redis.call('LRANGE', pool_key(step), 0, -1), {}
  if #ids ~= tonumber(redis.call('HGET', pool_info_key(step), 'size')) then return lost('part of pool ' .. step .. ' is gone') end
  for _, id in ipairs(ids) do
    if is_whole(id) then
      kept[#kept + 1] = id
    else
      gone[#gone + 1] = id
      redis.call('LREM', pool_key(step), 1, id)
      redis.call('UNLINK', traj(id), payload(id))
    end
  end
  if #gone > 0 then redis.call('HINCRBY', pool_info_key(step), 'size', -#gone) end
  count('claimed', -#gone)
  count('lost', #gone)
  return {'kept', gone, kept}
end

local questions, again = run.questions, {}
local due = (step - (run.defer or 0)) * questions  -- tickets of the pool that must be trained at this step
local kept_for = deferred and redis.call('HGET', key('reserved'), step)
if deferred and step > 0 and redis.call('EXISTS', key('taken')) == 0 then return lost('what was taken is gone') end
local tickets = {}
if kept_for then  -- this step has had them before
  for ticket in string.gmatch(kept_for, '%d+') do
    if redis.call('ZSCORE', key('ready'), ticket) then tickets[#tickets + 1] = ticket end
  end
elseif by_tickets then
  local known = 0  -- of the due tickets, those that are ready or taken
  for _, place in ipairs({'ready', 'taken'}) do
    known = known + redis.call('ZCOUNT', key(place), due, due + questions - 1)
  end
  if due < 0 or known == questions then
    local of_others, count_of_others = {}, 0  -- tickets that are kept for other steps
    if deferred then
      for _, listed in pairs(hash(key('reserved'))) do
        for ticket in string.gmatch(listed, '%d+') do of_others[ticket], count_of_others = true, count_of_others + 1 end
      end
    end
    local least, most = deferred and '-inf' or due, questions + count_of_others
    for _, ticket in ipairs(redis.call('ZRANGEBYSCORE', key('ready'), least, '+inf', 'LIMIT', 0, most)) do
      if #tickets < questions and not of_others[ticket] then tickets[#tickets + 1] = ticket end
    end
  end
else
  tickets = redis.call('ZRANGE', key('ready'), 0, questions - 1)
end
if #tickets < questions then
  if by_tickets then  -- requeue granted tickets that are in no place, or the learner would wait forever
    local function requeue_if_nowhere(name)
      for _, place in ipairs({'ready', 'requeue', 'lease'}) do
        if redis.call('ZSCORE', key(place), name) then return end
      end
      requeue(name)
      again[#again + 1] = name
    end
    if kept_for then
      for ticket in string.gmatch(kept_for, '%d+') do requeue_if_nowhere(ticket) end
    else
      local granted = natural(redis.call('GET', key('next_ticket'))) or 0
      for ticket = math.max(due, 0), math.min((step + 1) * questions, granted) - 1 do
        if not redis.call('ZSCORE', key('taken'), ticket) then requeue_if_nowhere(tostring(ticket)) end
      end
    end
  end
  return #again > 0 and {'waits', gone, again}
end

local ids = {}
for _, ticket in ipairs(tickets) do
  local slots = slots_of(ticket)
  local waiting, lacking = redis.call('HMGET', key('waiting'), unpack(slots)), 0
  for i, id in ipairs(slots) do
    if waiting[i] and is_whole(id) then
      ids[#ids + 1] = id
    else
      lacking = lacking + 1
      if waiting[i] then
        gone[#gone + 1] = id
        count_as_lost(id)
      end
    end
  end
  if lacking ~= lacking_of(ticket) then
    fail_attempt(ticket)
    again[#again + 1] = ticket
  end
end
if #again > 0 then return {'waits', gone, again} end
if action == 'look' then return {'found', gone, ids} end

if #ids ~= #ARGV - 3 then return false end
for i, id in ipairs(ids) do
  if id ~= ARGV[3 + i] then return false end  -- an operator has changed it in the meantime
end
for _, id in ipairs(ids) do
  remove_from_buffer(id)
  redis.call('HSET', traj(id), 'state', 'claimed')
  redis.call('RPUSH', pool_key(step), id)
end
for _, ticket in ipairs(tickets) do
  redis.call('ZREM', key('ready'), ticket)
  redis.call('HDEL', key('attempts'), ticket)
  if deferred then redis.call('ZADD', key('taken'), ticket, ticket) end
end
redis.call('HDEL', key('reserved'), step)
redis.call('HSET', pool_info_key(step), 'tickets', table.concat(tickets, ','), 'size', #ids)
count('claimed', #ids)
return {'kept', gone, ids}
