-- Commit a learner step: mark its pool as trained or unselected, and advance step, version and method state.
-- ARGV epoch step method(JSON: memory, fields, sizes) selected_id...
-- Returns 1, or 0 when the step was committed before.
local step, method = tonumber(ARGV[2]), cjson.decode(ARGV[3])
local refused = refusal_of(ARGV[1])
if refused then return refused end
if run.step > step then return 0 end
if run.step < step then return lost('it is at step ' .. run.step .. ', the learner at ' .. step) end
local next_ticket = natural(redis.call('GET', key('next_ticket')))
if not next_ticket then return lost('next_ticket is gone') end

local ids, is_of_pool = redis.call('LRANGE', pool_key(step), 0, -1), {}
if #ids ~= tonumber(redis.call('HGET', pool_info_key(step), 'size') or -1) then return lost('part of pool ' .. step .. ' is gone') end
for _, id in ipairs(ids) do is_of_pool[id] = true end
local trained, selected = {}, 0
for i = 4, #ARGV do
  if is_of_pool[ARGV[i]] then
    trained[ARGV[i]] = true
    selected = selected + 1
  elseif redis.call('HEXISTS', key('quarantine'), ARGV[i]) == 0 then  -- else an operator has just quarantined it
    return lost(ARGV[i] .. ' is gone from pool ' .. step)
  end
end
for _, id in ipairs(ids) do
  if has_fields(id) then redis.call('HSET', traj(id), 'state', trained[id] and 'trained' or 'unselected') end
end
redis.call('HSET', pool_info_key(step), 'trained', selected)
count('claimed', -#ids)
count('trained', selected)
count('unselected', #ids - selected)
save_method_state(method, next_ticket)
redis.call('HSET', state, 'step', step + 1, 'version', step + 1)
return 1
