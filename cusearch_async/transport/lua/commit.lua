-- A learner step is done: its pool is trained or unselected; step, version, phase and what the method remembers
-- move on; all at once.
-- KEYS state ledger pool visits sizes
-- ARGV epoch step prefix memory(JSON: phase, visits, sizes) selected_id...
-- Returns 1, or 0 when the step was committed before.
local state, ledger, pool, visits, sizes = unpack(KEYS)
local epoch, step, prefix, memory = ARGV[1], tonumber(ARGV[2]), ARGV[3], cjson.decode(ARGV[4])
if redis.call('HGET', state, 'epoch') ~= epoch then return redis.error_reply('FENCED') end
local current = tonumber(redis.call('HGET', state, 'step'))
if current > step then return 0 end
if current < step then return redis.error_reply('COMMIT of step ' .. step .. ' while at step ' .. current) end

local trained = {}
for i = 5, #ARGV do trained[ARGV[i]] = true end
local ids = redis.call('LRANGE', pool, 0, -1)
local selected = 0
for _, id in ipairs(ids) do
  if trained[id] then selected = selected + 1 end
end
if selected ~= #ARGV - 4 then return redis.error_reply('COMMIT selects trajectories that step did not claim') end
for _, id in ipairs(ids) do
  redis.call('HSET', prefix .. 'traj:' .. id, 'state', trained[id] and 'trained' or 'unselected')
end
redis.call('HINCRBY', ledger, 'claimed', -#ids)
redis.call('HINCRBY', ledger, 'trained', selected)
redis.call('HINCRBY', ledger, 'unselected', #ids - selected)
for question, history in pairs(memory.visits) do redis.call('HSET', visits, question, history) end
local next_ticket = tonumber(redis.call('HGET', state, 'next_ticket') or '0')
for ticket, size in pairs(memory.sizes) do  -- a group that is being played keeps the size it was granted with
  if tonumber(ticket) >= next_ticket then redis.call('HSETNX', sizes, ticket, size) end
end
redis.call('HSET', state, 'step', step + 1, 'version', step + 1, 'phase', memory.phase)
return 1
