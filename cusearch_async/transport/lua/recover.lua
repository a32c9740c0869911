-- A learner takes over at `step` with the method state of the checkpoint, and writes the run limits and the contract.
-- Pools that were trained after `step` become claimed again, so the same steps will get the same pools. What Redis has
-- lost, or never had, is played again or deleted. So is a group in which no episode has succeeded, with a new count of
-- attempts, and after a change of the contract everything that was played before. Every older learner is fenced.
-- A second delivery, however late, changes nothing: its nonce has an epoch already.
-- ARGV step method(JSON: memory, fields, sizes) nonce least_epoch limits(JSON: name -> text)
--      contract(JSON: key -> text, and its digest) accepts_changes [run_id host folder]
-- Returns the new epoch.
local step, method, nonce, least_epoch = tonumber(ARGV[1]), cjson.decode(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local limits, contract, accepts_changes = cjson.decode(ARGV[5]), cjson.decode(ARGV[6]), ARGV[7] == '1'
local run_id, host, folder = ARGV[8], ARGV[9], ARGV[10]

local OUTDATED = 'it was played before the settings of the run were changed (--accept-changes)'

-- 1. Read and check everything first: a script that fails halfway is not rolled back.
local given = redis.call('HGET', key('learners'), nonce)
if given then return tonumber(given) end
local whose = redis.call('HMGET', state, 'run_id', 'host', 'folder')  -- as text, which `run` is not
if run_id and whose[1] and whose[1] ~= run_id then
  return redis.error_reply('ANOTHER ' .. table.concat({whose[1], whose[2] or '?', whose[3] or '?'}, ' '))
end
local kinds = {
  ledger = 'hash', waiting = 'hash', depth_by_version = 'hash', owner = 'hash', groups = 'hash', attempts = 'hash',
  incomplete = 'hash', sizes = 'hash', memory = 'string', clock = 'hash', quarantine = 'hash', learners = 'hash',
  contract = 'hash', lease = 'zset', requeue = 'zset', ready = 'zset', workers = 'zset', next_ticket = 'string',
}
for name, kind in pairs(kinds) do
  local found = redis.call('TYPE', key(name)).ok
  if found ~= 'none' and found ~= kind then return lost(name .. ' is a ' .. found .. ' now') end
end
for _, name in ipairs({'epoch', 'step', 'checkpoint'}) do
  if run[name] and (type(run[name]) ~= 'number' or run[name] % 1 ~= 0) then return lost(name .. " is '" .. run[name] .. "' now") end
end
for _, number in ipairs(redis.call('HVALS', key('ledger'))) do
  if not string.match(number, '^%-?%d+$') then return lost("a counter of the ledger is '" .. number .. "' now") end
end
local forgotten, reached = run.checkpoint or 0, run.step or step
if step < forgotten then return redis.error_reply('GONE ' .. forgotten .. ' ' .. step) end
local granted = tonumber(redis.call('GET', key('next_ticket')) or 0) or 0  -- tickets below it
for _, name in ipairs({'questions', 'rollouts', 'order'}) do
  if granted > 0 and run[name] and tostring(run[name]) ~= limits[name] then
    return redis.error_reply('GRANTED ' .. name .. ' ' .. run[name])
  end
end
local another_contract = redis.call('EXISTS', key('contract')) == 1 and contract_refusal(contract.digest or '')
if another_contract and not accepts_changes then return another_contract end
local first = step * tonumber(limits.questions)
local next_ticket = math.max(granted, first)
local somewhere = {}  -- ticket -> true
for _, name in ipairs({'lease', 'requeue', 'ready'}) do
  for _, ticket in ipairs(redis.call('ZRANGE', key(name), 0, -1)) do somewhere[ticket] = true end
end
local pools, s = {}, step > reached and forgotten or step
while s <= reached or redis.call('EXISTS', pool_info_key(s)) == 1 do
  local info = redis.call('HMGET', pool_info_key(s), 'tickets', 'size', 'trained')
  if info[1] then
    local pool = {ids = redis.call('LRANGE', pool_key(s), 0, -1), tickets = {}, size = tonumber(info[2]) or 0}
    pool.trained = tonumber(info[3])
    for ticket in string.gmatch(info[1], '%d+') do pool.tickets[#pool.tickets + 1] = ticket end
    pools[s] = pool
  end
  s = s + 1
end

-- 2. From here on only writes that cannot fail.
redis.call('UNLINK', key('limits'), key('contract'))
for name, value in pairs(limits) do
  run[name] = tonumber(value) or value
  redis.call('HSET', key('limits'), name, value)
  redis.call('HDEL', state, name)  -- earlier versions had it here: their workers must not join a run with a contract
end
for name, text in pairs(contract) do redis.call('HSET', key('contract'), name, text) end
if run_id then redis.call('HSET', state, 'run_id', run_id, 'host', host, 'folder', folder) end
local to_requeue = {}
local function play_again(ticket)
  redis.call('HDEL', key('attempts'), ticket)
  to_requeue[ticket] = true
end
local function count_pool_as_lost(s, pool)
  if pool.trained then
    count('trained', -pool.trained)
    count('unselected', pool.trained - pool.size)
  else
    count('claimed', -pool.size)
  end
  count('lost', pool.size)
  forget_pool(s)
end
for s, pool in pairs(pools) do
  if s < step then  -- Redis is behind the checkpoint
    if not pool.trained then count_pool_as_lost(s, pool) else forget_pool(s) end
  elseif #pool.ids ~= pool.size then
    count_pool_as_lost(s, pool)
    for _, ticket in ipairs(pool.tickets) do to_requeue[ticket] = true end
  elseif another_contract or pool.size == 0 then
    if pool.trained then
      count('trained', -pool.trained)
      count('unselected', pool.trained - pool.size)
    else
      count('claimed', -pool.size)
    end
    for _, id in ipairs(pool.ids) do keep_apart(id, OUTDATED) end
    redis.call('UNLINK', pool_key(s), pool_info_key(s))
    for _, ticket in ipairs(pool.tickets) do
      somewhere[ticket] = true
      play_again(ticket)
    end
  else
    for _, ticket in ipairs(pool.tickets) do somewhere[ticket] = true end
    if pool.trained then
      count('trained', -pool.trained)
      count('unselected', pool.trained - pool.size)
      count('claimed', pool.size)
      redis.call('HDEL', pool_info_key(s), 'trained')
      for _, id in ipairs(pool.ids) do
        if redis.call('EXISTS', traj(id)) == 1 then redis.call('HSET', traj(id), 'state', 'claimed') end
      end
    end
  end
end
if step > reached then  -- the steps in between have used these tickets
  for _, id in ipairs(redis.call('HKEYS', key('waiting'))) do
    if tonumber(ticket_of(id)) < first then count_as_lost(id) end
  end
  for ticket in pairs(somewhere) do
    if tonumber(ticket) < first then
      end_lease(ticket)
      for _, name in ipairs({'requeue', 'ready'}) do redis.call('ZREM', key(name), ticket) end
      for _, name in ipairs({'groups', 'attempts', 'incomplete', 'sizes'}) do redis.call('HDEL', key(name), ticket) end
      somewhere[ticket] = nil
    end
  end
  forgotten = step
end

if another_contract then
  for _, id in ipairs(redis.call('HKEYS', key('waiting'))) do
    remove_from_buffer(id)
    keep_apart(id, OUTDATED)
  end
end
for ticket in pairs(somewhere) do
  local has_nothing = tonumber(redis.call('HGET', key('incomplete'), ticket)) == group_size(ticket)
  if another_contract or (has_nothing and redis.call('ZSCORE', key('ready'), ticket)) then play_again(ticket) end
end

save_method_state(method)
for ticket, size in pairs(method.sizes) do  -- as in commit; the staleness bound may have changed
  if tonumber(ticket) >= granted then redis.call('HSETNX', key('sizes'), ticket, size) end
end
for ticket in pairs(somewhere) do next_ticket = math.max(next_ticket, tonumber(ticket) + 1) end
redis.call('SET', key('next_ticket'), next_ticket)
local epoch = math.max(run.epoch or 0, least_epoch) + 1
redis.call('HSET', state, 'step', step, 'version', step, 'checkpoint', forgotten, 'epoch', epoch)
redis.call('HSET', key('learners'), nonce, epoch)

if run.order == 'ticket' then
  for ticket = first, next_ticket - 1 do
    if not somewhere[tostring(ticket)] then to_requeue[tostring(ticket)] = true end
  end
end
for ticket in pairs(to_requeue) do requeue(ticket) end

-- 3. Count the buffered trajectories again: buckets, depth_by_version or counters may have disappeared.
for depth = 0, run.s_max do redis.call('UNLINK', key('depth:' .. depth)) end
redis.call('UNLINK', key('depth_by_version'))
local counted = tonumber(redis.call('HGET', key('ledger'), 'buffered')) or 0
local waiting = redis.call('HGETALL', key('waiting'))
redis.call('HSET', key('ledger'), 'buffered', 0, 'bytes', 0)
for i = 1, #waiting, 2 do add_to_buffer(waiting[i], string.match(waiting[i + 1], '^(%d+):(%-?%d+):(%d+)$')) end
count('lost', math.max(0, counted - #waiting / 2))
tell()
return epoch
