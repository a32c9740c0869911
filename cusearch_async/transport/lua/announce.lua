-- Name the newest weight version that is complete in the weight store.
-- KEYS state   ARGV epoch version directory
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return redis.error_reply('FENCED') end
redis.call('HSET', KEYS[1], 'published', ARGV[2], 'weights', ARGV[3])
return 1
