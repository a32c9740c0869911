-- Quarantine trajectories with their reasons: from the buffer, where they are then generated again (one failed attempt
-- per group), or from a pool that is claimed and not committed.
-- One that comes again within ten minutes, with its token, was done: others may have the ids by now.
-- ARGV epoch(empty for an operator) token [id reason]...     Returns how many were quarantined.
local refused = ARGV[1] ~= '' and refusal_of(ARGV[1]) or without_limits()
if refused then return refused end
local answered = key('answered:' .. ARGV[2])
local before = redis.call('GET', answered)
if before then return tonumber(before) end

local function leave_pool(id)
  for step = run.step or 0, end_of_pools(run.step or 0) - 1 do
    if redis.call('LREM', pool_key(step), 1, id) == 1 then
      redis.call('HINCRBY', pool_info_key(step), 'size', -1)
      count('claimed', -1)
      return true
    end
  end
  return false
end

local taken, groups = 0, {}
for i = 3, #ARGV, 2 do
  local id = ARGV[i]
  local was_waiting = remove_from_buffer(id)
  if was_waiting then groups[ticket_of(id)] = true end
  if was_waiting or leave_pool(id) then
    keep_apart(id, ARGV[i + 1])
    taken = taken + 1
  end
end
for ticket in pairs(groups) do
  if redis.call('ZSCORE', key('ready'), ticket) then
    fail_attempt(ticket)
  else
    redis.call('HSET', key('groups'), ticket, group_size(ticket) - #missing(ticket))
  end
end
redis.call('SET', answered, taken, 'EX', 600)
return taken
