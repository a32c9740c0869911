-- Announce the newest weight version that is complete in the weight store. The versions of one learner only increase,
-- so a command that arrives late changes nothing. The next learner may start at an older version.
-- ARGV epoch version directory
local refused = refusal_of(ARGV[1])
if refused then return refused end
local version = tonumber(ARGV[2])
if run.announced_by == run.epoch and version < run.published then return 0 end
redis.call('HSET', state, 'published', version, 'weights', ARGV[3], 'announced_by', run.epoch)
tell()
return 1
