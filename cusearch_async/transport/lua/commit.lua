-- A learner step is done: its pool is trained or unselected; step, version, phase and what the method remembers
-- move on; all at once.
-- ARGV epoch step memory(JSON: phase, visits, sizes) selected_id...
-- Returns 1, or 0 when the step was committed before.
local epoch, step, memory = ARGV[1], tonumber(ARGV[2]), cjson.decode(ARGV[3])
if is_fenced(epoch) then return redis.error_reply('FENCED') end
local current = of_state('step', '0')
if current > step then return 0 end
if current < step then return redis.error_reply('LOST ' .. current) end

local trained = {}
for i = 4, #ARGV do trained[ARGV[i]] = true end
local ids = redis.call('LRANGE', key('pool:' .. step), 0, -1)
local selected = 0
for _, id in ipairs(ids) do
  if trained[id] then selected = selected + 1 end
end
if selected ~= #ARGV - 3 then return redis.error_reply('LOST ' .. current) end
for _, id in ipairs(ids) do
  redis.call('HSET', traj(id), 'state', trained[id] and 'trained' or 'unselected')
end
count('claimed', -#ids)
count('trained', selected)
count('unselected', #ids - selected)
for question, history in pairs(memory.visits) do redis.call('HSET', key('visits'), question, history) end
local next_ticket = next_ticket_of()
for ticket, size in pairs(memory.sizes) do  -- a group that is being played keeps the size it was granted with
  if tonumber(ticket) >= next_ticket then redis.call('HSETNX', key('sizes'), ticket, size) end
end
redis.call('HSET', state, 'step', step + 1, 'version', step + 1, 'phase', memory.phase)
return 1
