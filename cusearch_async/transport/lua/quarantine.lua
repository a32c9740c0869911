-- Take a trajectory out, and keep it apart with the reason: one of the claimed pool that cannot be read (the
-- learner), or a buffered one (an operator; an open group then plays it again).
-- ARGV id reason epoch step     epoch '' for an operator
-- Returns 1, or 0 when there is no such trajectory to take out.
local id, reason, epoch, step = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local ticket = string.match(id, '^%d+')
if epoch ~= '' and is_fenced(epoch) then return redis.error_reply('FENCED') end
if epoch ~= '' then
  if redis.call('LREM', key('pool:' .. step), 1, id) == 0 then return 0 end
  count('claimed', -1)
else
  local known = redis.call('HMGET', traj(id), 'state', 'depth', 'version', 'bytes')
  if known[1] ~= 'buffered' then return 0 end
  wait_in_bucket(id, known[2], known[3], tonumber(known[4]), -1)
  if redis.call('HEXISTS', key('groups'), ticket) == 1 then redis.call('HINCRBY', key('groups'), ticket, -1) end
end
count('quarantined', 1)
if redis.call('EXISTS', traj(id)) == 1 then
  redis.call('RENAME', traj(id), key('quarantined:' .. id))
  redis.call('HSET', key('quarantined:' .. id), 'state', 'quarantined')
end
if redis.call('EXISTS', payload(id)) == 1 then redis.call('RENAME', payload(id), key('quarantined-payload:' .. id)) end
redis.call('HSET', key('quarantine'), id, reason)
return 1
