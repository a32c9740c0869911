-- Name the newest weight version that is complete in the weight store. A learner's versions only grow, so that a
-- command which arrives late changes nothing; the next learner may begin at an older one.
-- ARGV epoch version directory
local refused = refusal_of(ARGV[1])
if refused then return refused end
local version = tonumber(ARGV[2])
if run.announced_by == run.epoch and version < run.published then return 0 end
redis.call('HSET', state, 'published', version, 'weights', ARGV[3], 'announced_by', run.epoch)
return 1
