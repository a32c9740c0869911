-- A learner takes over at `step` with the method state of the checkpoint, and writes the run limits and its identity.
-- Pools that were trained after `step` become claimed again, so the same steps will get the same pools. Data that Redis
-- has lost, or never had, is generated again or deleted. So is a group in which no episode has succeeded, with a new
-- count of attempts, and after a change of the contract all earlier trajectories. Every older learner is fenced.
-- A second delivery, however late, changes nothing: its nonce has an epoch already.
-- ARGV step method(JSON: memory, fields, sizes) nonce least_epoch limits(JSON: name -> text)
--      identity(JSON: terms(key -> text), their digest, run_id, host, folder) accepts_changes
-- Returns the new epoch.
local step, method, nonce, least_epoch = tonumber(ARGV[1]), cjson.decode(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local limits, own, accepts_changes = cjson.decode(ARGV[5]), cjson.decode(ARGV[6]), ARGV[7] == '1'

local OUTDATED = 'it was generated before the settings of the run were changed (--accept-changes)'

-- 1. Read and check everything first: a script that fails halfway is not rolled back.
local given = redis.call('HGET', key('learners'), nonce)
if given then return tonumber(given) end
local kinds = {  -- not `news`: `tell` makes it again
  ledger = 'hash', waiting = 'hash', depth_by_version = 'hash', owner = 'hash', groups = 'hash', attempts = 'hash',
  incomplete = 'hash', sizes = 'hash', memory = 'string', clock = 'hash', quarantine = 'hash', learners = 'hash',
  contract = 'hash', lease = 'zset', requeue = 'zset', ready = 'zset', workers = 'zset', next_ticket = 'string',
  taken = 'zset', reserved = 'hash', leased_at = 'zset', hedged = 'hash',
}
for name, kind in pairs(kinds) do
  local found = redis.call('TYPE', key(name)).ok
  if found ~= 'none' and found ~= kind then return damaged(name .. ' is a ' .. found .. ' now') end
end
local another_contract = redis.call('EXISTS', key('contract')) == 1 and contract_refusal(own.digest)
if another_contract and not accepts_changes then return another_contract end
if own.folder ~= '' and (redis.call('HGET', state, 'run_id') or own.run_id) ~= own.run_id then return another_run() end
for _, name in ipairs({'epoch', 'step', 'checkpoint', 'published', 'pools_end'}) do
  if run[name] and (type(run[name]) ~= 'number' or run[name] % 1 ~= 0) then return damaged(name .. " is '" .. run[name] .. "' now") end
end
local numbers = {ledger = 'a counter of the ledger', incomplete = 'a count of incomplete', groups = 'a count of groups',
  attempts = 'a count of attempts', sizes = 'a size', clock = 'the clock'}
for name, what in pairs(numbers) do
  for _, number in ipairs(redis.call('HVALS', key(name))) do
    local size = natural((string.gsub(number, '^%-', '')))
    if not size or (name == 'sizes' and (size < 1 or size > 7000)) then return damaged(what .. " is '" .. number .. "' now") end
  end
end
local depths = {}
for id, known in pairs(hash(key('waiting'))) do
  local depth, version, bytes = string.match(known, '^(%d+):%-?(%d+):(%d+)$')
  local is_id = string.match(id, '^%d+:%d+$') and #id < 30
  if not (is_id and natural(depth) and natural(version) and natural(bytes)) then
    return damaged("waiting holds '" .. id .. "' = '" .. known .. "' now")
  end
  depths[depth] = true
end
local forgotten, reached = run.checkpoint or 0, run.step or step
if reached - forgotten > 1e6 then return damaged('step is ' .. reached .. ', after checkpoint ' .. forgotten) end
if step < forgotten then return redis.error_reply('GONE ' .. forgotten .. ' ' .. step) end
local granted = natural(redis.call('GET', key('next_ticket')) or '0')  -- tickets below it
if not granted then return damaged('next_ticket is no number now') end
for _, name in ipairs({'questions', 'rollouts', 'order', 'defer'}) do
  if granted > 0 and run[name] and tostring(run[name]) ~= limits[name] then
    return redis.error_reply('GRANTED ' .. name .. ' ' .. run[name])
  end
end
local first = step * tonumber(limits.questions)
local next_ticket = math.max(granted, first)
local somewhere, known, last = {}, 0, granted  -- ticket -> true; how many; no ticket is above
for _, name in ipairs({'lease', 'requeue', 'ready'}) do
  for _, ticket in ipairs(redis.call('ZRANGE', key(name), 0, -1)) do
    if tostring(natural(ticket)) ~= ticket then return damaged(name .. " holds '" .. ticket .. "' now") end
    somewhere[ticket], known, last = true, known + 1, math.max(last, ticket)
  end
end
local pools, pools_end = {}, end_of_pools(reached + 1)
if pools_end - forgotten > 1e6 then return damaged('pools_end is ' .. pools_end .. ', after checkpoint ' .. forgotten) end
for s = step > reached and forgotten or step, pools_end - 1 do
  local info = redis.call('HMGET', pool_info_key(s), 'tickets', 'size', 'trained')
  if info[1] then
    local pool = {ids = redis.call('LRANGE', pool_key(s), 0, -1), tickets = {}, size = natural(info[2]) or 0}
    pool.trained, pool.listed = natural(info[3]), info[1]
    for ticket in string.gmatch(info[1], '%d+') do pool.tickets[#pool.tickets + 1] = ticket end
    pools[s], known = pool, known + #pool.tickets
  end
end
local was_taken = {}  -- ticket -> true
for _, ticket in ipairs(redis.call('ZRANGE', key('taken'), 0, -1)) do
  if not natural(ticket) then return damaged("taken holds '" .. ticket .. "' now") end
  was_taken[ticket] = true
end
run.questions = tonumber(limits.questions)
run.max_staleness = math.max(run.max_staleness or 0, limits.max_staleness)  -- of the learner before, and of this one
local bound = ticket_bound(math.max(step, reached, run.published or 0), known)
if last > bound then
  return damaged((last == granted and 'next_ticket' or 'a ticket') .. ' is ' .. last .. ' now, and none above ' .. bound .. ' can be')
end

-- 2. From here on only writes that cannot fail.
redis.call('UNLINK', key('limits'), key('contract'))
for name, value in pairs(limits) do
  run[name] = tonumber(value) or value
  redis.call('HSET', key('limits'), name, value)
end
for name, text in pairs(own.terms) do redis.call('HSET', key('contract'), name, text) end
if own.digest ~= '' then redis.call('HSET', key('contract'), 'digest', own.digest) end
if own.run_id ~= '' then redis.call('HSET', state, 'run_id', own.run_id, 'host', own.host, 'folder', own.folder) end
local is_counted = not run.epoch or redis.call('EXISTS', key('ledger')) == 1
if not is_counted then  -- the ledger has disappeared: count what is kept
  for s = forgotten, pools_end - 1 do  -- a learner may have gone back behind some
    local size, trained = unpack(redis.call('HMGET', pool_info_key(s), 'size', 'trained'))
    count(trained and 'trained' or 'claimed', tonumber(trained or size or 0))
    if trained then count('unselected', size - trained) end
  end
  count('quarantined', redis.call('HLEN', key('quarantine')))
end
deferred, by_tickets = run.order == 'deferred', run.order ~= 'oldest_complete'
local due = math.max(0, (step - run.defer) * run.questions)  -- the pools before `step` have all tickets below it
local knows_taken = step == 0 or next(was_taken) ~= nil
if reached < step then redis.call('UNLINK', key('taken'), key('reserved')) end
local to_requeue = {}
-- Keep tickets for step s, which will have the same again. With other settings some might not be granted before that
-- step is done, and in a run with another contract all are dissolved: then they are open again. True if they are kept.
local function reserve(s, listed)
  local most = math.min(tonumber(s) + run.max_staleness + 1, run.steps) * run.questions
  local keeps = deferred and not another_contract
  for ticket in string.gmatch(listed, '%d+') do keeps = keeps and tonumber(ticket) < most end
  if keeps then
    redis.call('HSET', key('reserved'), s, listed)
  else
    redis.call('HDEL', key('reserved'), s)
    for ticket in string.gmatch(listed, '%d+') do
      was_taken[ticket] = nil
      redis.call('ZREM', key('taken'), ticket)
    end
  end
  return keeps
end
for s, listed in pairs(hash(key('reserved'))) do reserve(s, listed) end
local function generate_again(ticket)
  redis.call('HDEL', key('attempts'), ticket)
  to_requeue[ticket] = true
end
for s, pool in pairs(pools) do
  local is_behind, is_lost = s < step, #pool.ids ~= pool.size  -- Redis is behind the checkpoint, or has lost the list
  if not pool.trained then
    count('claimed', -pool.size)
  elseif not is_behind then
    count('trained', -pool.trained)
    count('unselected', pool.trained - pool.size)
  end
  if is_behind then
    if not pool.trained then count('lost', pool.size) end
    forget_pool(s)
  elseif is_lost then
    count('lost', pool.size)
    forget_pool(s, true)
    pool.is_open = not reserve(s, pool.listed)
    for _, ticket in ipairs(pool.tickets) do to_requeue[ticket] = true end
  elseif another_contract or pool.size == 0 then
    for _, id in ipairs(pool.ids) do keep_apart(id, OUTDATED) end
    redis.call('UNLINK', pool_key(s), pool_info_key(s))
    pool.is_open = not reserve(s, pool.listed)
    for _, ticket in ipairs(pool.tickets) do
      somewhere[ticket] = true
      generate_again(ticket)
    end
  else
    count('claimed', pool.size)
    redis.call('HDEL', pool_info_key(s), 'trained')
    for _, ticket in ipairs(pool.tickets) do somewhere[ticket] = true end
    for _, id in ipairs(pool.ids) do
      if has_fields(id) then redis.call('HSET', traj(id), 'state', 'claimed') end
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
  local has_nothing = lacking_of(ticket) == group_size(ticket)
  if another_contract or (has_nothing and redis.call('ZSCORE', key('ready'), ticket)) then generate_again(ticket) end
end

if another_contract then  -- groups that are generated again have the sizes that this learner's method plans
  local function is_open(ticket) return somewhere[ticket] or to_requeue[ticket] end
  for _, ticket in ipairs(redis.call('HKEYS', key('sizes'))) do
    if is_open(ticket) or tonumber(ticket) >= granted then redis.call('HDEL', key('sizes'), ticket) end
  end
  for ticket, size in pairs(method.sizes) do
    if is_open(ticket) then redis.call('HSET', key('sizes'), ticket, size) end
  end
end
-- weights of before: a worker that began with them would sample what then looks fresh
if another_contract then redis.call('HDEL', state, 'published', 'weights', 'announced_by') end
save_method_state(method, granted)
for ticket in pairs(somewhere) do next_ticket = math.max(next_ticket, tonumber(ticket) + 1) end
redis.call('SET', key('next_ticket'), next_ticket)
local epoch = math.max(run.epoch or 0, least_epoch) + 1
redis.call('HSET', state, 'step', step, 'version', step, 'checkpoint', forgotten, 'epoch', epoch, 'pools_end', pools_end,
  'resumed', step)
redis.call('HSET', key('learners'), nonce, epoch)

if by_tickets then  -- all tickets are somewhere, or taken by the steps before
  local function take(ticket)
    was_taken[tostring(ticket)] = true
    redis.call('ZADD', key('taken'), ticket, ticket)
  end
  if deferred and (step > reached or not knows_taken) then  -- `first` tickets were; which of them is not known
    local counted, before = 0, math.max(0, due - run.questions)
    was_taken = {}
    for ticket = before, next_ticket - 1 do
      local is_open = somewhere[tostring(ticket)] or to_requeue[tostring(ticket)]
      if counted < first - before and not is_open then
        take(ticket)
        counted = counted + 1
      end
    end
    for s, pool in pairs(pools) do
      if s >= step and not pool.is_open then for _, ticket in ipairs(pool.tickets) do take(ticket) end end
    end
  end
  for ticket = due, next_ticket - 1 do
    local name = tostring(ticket)
    if not somewhere[name] and not was_taken[name] then to_requeue[name] = true end
  end
end
for ticket in pairs(to_requeue) do requeue(ticket) end

-- 3. Count the buffered trajectories again: buckets, depth_by_version or counters may have disappeared.
for depth = 0, run.s_max do depths[depth] = true end
for depth in pairs(depths) do redis.call('UNLINK', key('depth:' .. depth)) end
redis.call('UNLINK', key('depth_by_version'))
local counted = tonumber(redis.call('HGET', key('ledger'), 'buffered')) or 0
redis.call('HSET', key('ledger'), 'buffered', 0, 'bytes', 0)
for id, known in pairs(hash(key('waiting'))) do add_to_buffer(id, string.match(known, '^(%d+):(%-?%d+):(%d+)$')) end
count('lost', math.max(0, counted - redis.call('HLEN', key('waiting'))))
if not is_counted then
  for _, name in ipairs({'buffered', 'claimed', 'trained', 'unselected', 'quarantined', 'lost'}) do
    count('finished', tonumber(redis.call('HGET', key('ledger'), name) or 0))
  end
end
tell()
return epoch
