-- Shared code of the scripts that quarantine; workers run none of them.
local function move(from, to)
  redis.call('UNLINK', to)
  if redis.call('EXISTS', from) == 1 then redis.call('RENAME', from, to) end
end

-- Quarantine a trajectory that is in no bucket and no pool any more. The newest 1,000 are kept.
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
  count('quarantined', 1)
end
