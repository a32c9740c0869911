-- Take N groups for a learner step, all or none. The same step gets the same pool again.
-- ARGV epoch step questions rollouts order s_max
-- Returns trajectory ids, or nothing while there is no complete pool.
local epoch, step, questions = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local rollouts, order = tonumber(ARGV[4]), ARGV[5]
local pool = key('pool:' .. step)
if is_fenced(epoch) then return redis.error_reply('FENCED') end
if redis.call('EXISTS', pool) == 1 then return redis.call('LRANGE', pool, 0, -1) end

local tickets
if order == 'ticket' then
  tickets = redis.call('ZRANGEBYSCORE', key('ready'), step * questions, (step + 1) * questions - 1)
else
  tickets = redis.call('ZRANGE', key('ready'), 0, questions - 1)
end
if #tickets < questions then return {} end

local ids = {}
for _, ticket in ipairs(tickets) do
  for rollout = 0, group_size(ticket, rollouts) - 1 do
    local id = ticket .. ':' .. rollout
    local known = redis.call('HMGET', traj(id), 'depth', 'version', 'bytes')
    if known[1] and known[2] and known[3] then
      wait_in_bucket(id, known[1], known[2], tonumber(known[3]), -1)
      ids[#ids + 1] = id
    elseif redis.call('EXISTS', traj(id)) == 1 then  -- damaged: the learner will quarantine it
      for depth = 0, tonumber(ARGV[6]) do redis.call('ZREM', key('depth:' .. depth), id) end
      count('buffered', -1)
      ids[#ids + 1] = id
    end
  end
end
if #ids == 0 then return redis.error_reply('EMPTY') end
for _, id in ipairs(ids) do
  redis.call('HSET', traj(id), 'state', 'claimed')
  redis.call('RPUSH', pool, id)
end
for _, ticket in ipairs(tickets) do redis.call('ZREM', key('ready'), ticket) end
count('claimed', #ids)
return ids
