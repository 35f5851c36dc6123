#!lua flags=allow-oom
-- Put an item back on the queue: at the front when its worker stops, at the back when an attempt failed and may be repeated.
-- KEYS  1 job hash  2 wip zset  3 the job's executions zset  4 execution hash  5 the worker's executions set  6 queue list
--       7 run state hash
-- ARGV  1 execution id  2 job id  3 ISO time  4 'handed_back' or 'retried'
-- returns 'released' or 'lost' (it is not ours any more, or this is the second call)
local job = redis.call('HMGET', KEYS[1], 'status', 'distaff_exec')
local composite = ARGV[2] .. ':' .. ARGV[1]
local verdict = 'lost'
if job[1] == 'started' and job[2] == ARGV[1] then
  verdict = 'released'
  redis.call('HSET', KEYS[1], 'status', 'queued', 'enqueued_at', ARGV[3])
  redis.call('HDEL', KEYS[1], 'distaff_exec', 'started_at')
  if ARGV[4] == 'retried' then
    redis.call('HINCRBY', KEYS[1], 'distaff_attempts', 1)
    redis.call('RPUSH', KEYS[6], ARGV[2])
  else
    redis.call('LPUSH', KEYS[6], ARGV[2])
  end
  if redis.call('EXISTS', KEYS[7]) == 1 then redis.call('HINCRBY', KEYS[7], ARGV[4], 1) end
end
redis.call('DEL', KEYS[4])
redis.call('ZREM', KEYS[2], composite)
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('SREM', KEYS[5], composite)
return verdict
