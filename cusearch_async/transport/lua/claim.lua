-- Take N complete groups for a learner step, all or none. The same step gets the same pool again.
-- KEYS state ready ledger pool sizes
-- ARGV epoch step questions rollouts order prefix
-- Returns trajectory ids, or nothing while there is no complete pool.
local state, ready, ledger, pool, sizes = unpack(KEYS)
local epoch, step, questions = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local rollouts, order, prefix = tonumber(ARGV[4]), ARGV[5], ARGV[6]
if redis.call('HGET', state, 'epoch') ~= epoch then return redis.error_reply('FENCED') end
if redis.call('EXISTS', pool) == 1 then return redis.call('LRANGE', pool, 0, -1) end

local tickets
if order == 'ticket' then
  tickets = redis.call('ZRANGEBYSCORE', ready, step * questions, (step + 1) * questions - 1)
else
  tickets = redis.call('ZRANGE', ready, 0, questions - 1)
end
if #tickets < questions then return {} end

local ids = {}
for _, ticket in ipairs(tickets) do
  for rollout = 0, (tonumber(redis.call('HGET', sizes, ticket)) or rollouts) - 1 do
    local id = ticket .. ':' .. rollout
    local depth = redis.call('HGET', prefix .. 'traj:' .. id, 'depth')
    if depth then
      redis.call('ZREM', prefix .. 'depth:' .. depth, id)
      redis.call('HSET', prefix .. 'traj:' .. id, 'state', 'claimed')
      redis.call('RPUSH', pool, id)
      ids[#ids + 1] = id
    end
  end
  redis.call('ZREM', ready, ticket)
end
redis.call('HINCRBY', ledger, 'buffered', -#ids)
redis.call('HINCRBY', ledger, 'claimed', #ids)
return ids
