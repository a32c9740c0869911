-- Count the keys of a run against its counters, in one instant. Changes nothing.
-- ARGV id...     of every traj: and payload: key that has just been seen
-- Returns {trajectories in Redis, {difference...}}
local findings, counters = {}, hash(key('ledger'))
if not run.epoch then return {0, findings} end
if not run.questions then return {0, {'limits are missing: the next learner writes them again'}} end
local function find(text) findings[#findings + 1] = text end
local function expect(what, counted, counter)
  if counted ~= counter then find(what .. ': ' .. counted .. ' by keys, ' .. counter .. ' by counters') end
end
local function list(what, names)
  if #names == 0 then return end
  table.sort(names)
  find(what .. ': ' .. #names .. ' (' .. table.concat(names, ', ', 1, math.min(5, #names)) .. (#names > 5 and ', ...)' or ')'))
end
local function counter(name) return tonumber(counters[name]) or 0 end

-- buffered trajectories
local known, kept, gone, outside, bytes, cells, depths = {}, 0, {}, {}, 0, {}, {}
for depth = 0, run.s_max do depths[tostring(depth)] = true end
local function keep(id)
  known[id] = true
  kept = kept + 1
  if not is_whole(id) then gone[#gone + 1] = id end
end
for id, value in pairs(hash(key('waiting'))) do
  local cell, depth, size = string.match(value, '^((%d+):%-?%d+):(%d+)$')
  if not cell then return damaged("waiting holds '" .. id .. "' = '" .. value .. "'") end
  keep(id)
  bytes = bytes + size
  depths[depth] = true  -- a worker with another s_max may have put it there
  cells[cell] = (cells[cell] or 0) + 1
  if not redis.call('ZSCORE', key('depth:' .. depth), id) then outside[#outside + 1] = id end
end
local in_buckets = 0
for depth in pairs(depths) do in_buckets = in_buckets + redis.call('ZCARD', key('depth:' .. depth)) end
expect('buffered', kept, counter('buffered'))
expect('in the depth buckets', in_buckets, counter('buffered'))
expect('bytes', bytes, counter('bytes'))
list('buffered, and not in the bucket of their depth', outside)
for cell, number in pairs(hash(key('depth_by_version'))) do
  expect('depth_by_version ' .. cell, cells[cell] or 0, tonumber(number))
  cells[cell] = nil
end
for cell, number in pairs(cells) do expect('depth_by_version ' .. cell, number, 0) end

-- claimed and trained pools
local claimed, trained, unselected, places = 0, 0, 0, {}
local function at(ticket) places[ticket] = (places[ticket] or 0) + 1 end
local function read_pool(step)
  local info = redis.call('HMGET', pool_info_key(step), 'tickets', 'size', 'trained')
  local ids, selected = redis.call('LRANGE', pool_key(step), 0, -1), 0
  expect('pool ' .. step, #ids, tonumber(info[2]) or -1)
  for ticket in string.gmatch(info[1] or '', '%d+') do at(ticket) end
  for _, id in ipairs(ids) do
    keep(id)
    if redis.call('HGET', traj(id), 'state') == 'trained' then selected = selected + 1 end
  end
  if step < run.step then
    expect('trained of pool ' .. step, selected, tonumber(info[3]) or -1)
    trained, unselected = trained + selected, unselected + #ids - selected
  else
    claimed = claimed + #ids
  end
end
for step = run.checkpoint, end_of_pools(run.step) - 1 do
  if step < run.step or redis.call('EXISTS', pool_info_key(step)) == 1 then read_pool(step) end
end
expect('claimed', claimed, counter('claimed'))
if run.checkpoint == 0 then  -- else pools that were forgotten are in the counters
  expect('trained', trained, counter('trained'))
  expect('unselected', unselected, counter('unselected'))
end
list('missing, and not counted as lost', gone)
local unknown = {}
for _, id in ipairs(ARGV) do
  if not known[id] and redis.call('EXISTS', traj(id), payload(id)) > 0 then unknown[#unknown + 1] = id end
end
list('orphaned', unknown)
local finished = 0
for _, name in ipairs({'buffered', 'claimed', 'trained', 'unselected', 'quarantined', 'lost'}) do
  finished = finished + counter(name)
end
expect('finished', finished, counter('finished'))

-- tickets
local open, wrong = {}, {}
for _, name in ipairs({'lease', 'requeue'}) do
  for _, ticket in ipairs(redis.call('ZRANGE', key(name), 0, -1)) do
    at(ticket)
    open[ticket] = true
  end
end
for _, ticket in ipairs(redis.call('ZRANGE', key('ready'), 0, -1)) do
  at(ticket)
  if #missing(ticket) ~= lacking_of(ticket) then wrong[#wrong + 1] = ticket end
end
list('ready tickets that lack trajectories', wrong)
wrong = {}
for ticket in pairs(open) do
  local finished_so_far = tonumber(redis.call('HGET', key('groups'), ticket)) or 0
  if finished_so_far ~= group_size(ticket) - #missing(ticket) then wrong[#wrong + 1] = ticket end
end
list('open tickets with a wrong count', wrong)
expect('leased', redis.call('HLEN', key('owner')), redis.call('ZCARD', key('lease')))
local nowhere, twice, in_places = {}, {}, 0
for ticket, number in pairs(places) do
  in_places = in_places + 1
  if number > 1 then twice[#twice + 1] = ticket end
end
if by_tickets then  -- in the other order, forgotten pools may have held any of them
  local next_ticket = natural(redis.call('GET', key('next_ticket'))) or 0
  local bound = ticket_bound(math.max(run.step, run.published or 0), in_places)
  if next_ticket > bound then find('next_ticket: ' .. next_ticket .. ', more than ' .. bound .. ' cannot be granted') end
  local oldest = math.max(0, (run.checkpoint - run.defer) * run.questions)
  for ticket = oldest, math.min(next_ticket, bound) - 1 do
    if not places[tostring(ticket)] and not redis.call('ZSCORE', key('taken'), ticket) then nowhere[#nowhere + 1] = tostring(ticket) end
  end
end
list('tickets that are nowhere', nowhere)
list('tickets that are in two places', twice)
return {kept, findings}
