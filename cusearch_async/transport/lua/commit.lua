-- A learner step is done: its pool is trained or unselected, step, version and phase move on; all at once.
-- KEYS state ledger pool
-- ARGV epoch step phase prefix selected_id...
-- Returns 1, or 0 when the step was committed before.
local state, ledger, pool = unpack(KEYS)
local epoch, step, phase, prefix = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
if redis.call('HGET', state, 'epoch') ~= epoch then return redis.error_reply('FENCED') end
local current = tonumber(redis.call('HGET', state, 'step'))
if current > step then return 0 end
if current < step then return redis.error_reply('COMMIT of step ' .. step .. ' while at step ' .. current) end

local trained = {}
for i = 5, #ARGV do trained[ARGV[i]] = true end
local ids = redis.call('LRANGE', pool, 0, -1)
local selected = 0
for _, id in ipairs(ids) do
  local outcome = 'unselected'
  if trained[id] then
    outcome = 'trained'
    selected = selected + 1
  end
  redis.call('HSET', prefix .. 'traj:' .. id, 'state', outcome)
end
if selected ~= #ARGV - 4 then return redis.error_reply('COMMIT selects trajectories that step did not claim') end
redis.call('HINCRBY', ledger, 'claimed', -#ids)
redis.call('HINCRBY', ledger, 'trained', selected)
redis.call('HINCRBY', ledger, 'unselected', #ids - selected)
redis.call('HSET', state, 'step', step + 1, 'version', step + 1, 'phase', phase)
return 1
