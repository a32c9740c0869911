-- Quarantine trajectories with their reasons: from the buffer, where their groups then play them again (one failed
-- attempt per group), or from a pool that is claimed and not committed. The newest 1,000 are kept.
-- ARGV epoch(empty for an operator) [id reason]...     Returns how many were quarantined.
local refused = ARGV[1] ~= '' and refusal_of(ARGV[1])
if refused then return refused end

local function leave_pool(id)
  local step = run.step or 0
  while redis.call('EXISTS', pool_info_key(step)) == 1 do
    if redis.call('LREM', pool_key(step), 1, id) == 1 then
      redis.call('HINCRBY', pool_info_key(step), 'size', -1)
      count('claimed', -1)
      return true
    end
    step = step + 1
  end
  return false
end

local function move(from, to)
  redis.call('UNLINK', to)
  if redis.call('EXISTS', from) == 1 then redis.call('RENAME', from, to) end
end

local function keep_apart(id, reason)
  local fields = key('quarantined:' .. id)
  move(traj(id), fields)
  move(payload(id), key('quarantined-payload:' .. id))
  redis.call('HSET', fields, 'state', 'quarantined')
  redis.call('HSET', key('quarantine'), id, reason)
  redis.call('LREM', key('quarantine-order'), 1, id)
  if redis.call('LPUSH', key('quarantine-order'), id) > 1000 then
    local oldest = redis.call('RPOP', key('quarantine-order'))
    redis.call('HDEL', key('quarantine'), oldest)
    redis.call('UNLINK', key('quarantined:' .. oldest), key('quarantined-payload:' .. oldest))
  end
end

local taken, groups = 0, {}
for i = 2, #ARGV, 2 do
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
count('quarantined', taken)
return taken
