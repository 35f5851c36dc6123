-- Create a run, or say what it is if it is there: the configuration of a run never changes after this.
-- Idempotent: sent again after a lost reply it finds the run it made.
-- KEYS  1 run config  2 run state hash  3 set of runs
-- ARGV  1 configuration as JSON  2 run name  3 items the producer intends to admit, "" while unknown
-- returns {'opened' | 'exists', the stored configuration, admitted so far, status}
if redis.call('EXISTS', KEYS[1], KEYS[2]) == 2 then
  local state = redis.call('HMGET', KEYS[2], 'admitted', 'status')
  return {'exists', redis.call('GET', KEYS[1]), tonumber(state[1] or '0'), state[2] or 'open'}
end
local clock = redis.call('TIME')
redis.call('SET', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
redis.call('HSET', KEYS[2], 'status', 'open', 'admitted', 0, 'emitted', 0, 'dead', 0, 'dropped', 0,
           'opened', clock[1] .. '.' .. string.format('%06d', clock[2]))
if ARGV[3] ~= '' then redis.call('HSET', KEYS[2], 'target', ARGV[3]) end
redis.call('SADD', KEYS[3], ARGV[2])
return {'opened', ARGV[1], 0, 'open'}
