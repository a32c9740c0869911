-- Name the newest weight version that is complete in the weight store.
-- ARGV epoch version directory
if is_fenced(ARGV[1]) then return redis.error_reply('FENCED') end
redis.call('HSET', state, 'published', ARGV[2], 'weights', ARGV[3])
return 1
