-- Record that this learner has done and saved all steps of the run. The next one that takes over has another epoch, so
-- the run is open again then.
-- ARGV epoch
local refused = refusal_of(ARGV[1])
if refused then return refused end
redis.call('HSET', state, 'finished_by', run.epoch)
tell()
return 1
