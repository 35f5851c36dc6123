#!lua flags=allow-oom
-- Extend the leases of a worker's executions, each only while it is the owner. Whose an item is, its job hash says alone: a lease that
-- was wiped from the registry (stock `rq info` does that by the operator's clock) or ran out during an outage is written again, whole:
-- RQ's own commands fail on an execution without its fields. Brings no job back to life.
-- What is left of an execution that was lost, or whose claim never reached the worker, is taken off here: nobody else knows it.
-- Allowed when memory is full: a lease that cannot be extended is work done twice.
-- KEYS  1 wip zset  2 the worker's executions set
-- ARGV  1 lease in ms  2 ISO time  3 job key prefix  4 execution key prefix  5 executions key prefix  6.. job id, execution id, ...
-- returns one number an execution: 1 still ours, 0 lost
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local lease_ms, answer = tonumber(ARGV[1]), {}
for i = 6, #ARGV, 2 do
  local id, execution = ARGV[i], ARGV[i + 1]
  local composite = id .. ':' .. execution
  local owner = redis.call('HMGET', ARGV[3] .. id, 'status', 'distaff_exec', 'worker_name')
  if owner[1] == 'started' and owner[2] == execution then
    redis.call('HSET', ARGV[3] .. id, 'last_heartbeat', ARGV[2])
    redis.call('HSET', ARGV[4] .. composite, 'id', execution, 'job_id', id, 'last_heartbeat', now)
    redis.call('HSETNX', ARGV[4] .. composite, 'created_at', now)
    redis.call('HSETNX', ARGV[4] .. composite, 'worker_name', owner[3] or '')
    redis.call('PEXPIRE', ARGV[4] .. composite, lease_ms)
    redis.call('SADD', KEYS[2], composite)
    redis.call('ZADD', KEYS[1], now + lease_ms / 1000, composite)
    redis.call('ZADD', ARGV[5] .. id, now + lease_ms / 1000 + 60, execution)
    redis.call('PEXPIRE', ARGV[5] .. id, lease_ms + 60000)
    answer[#answer + 1] = 1
  else
    redis.call('DEL', ARGV[4] .. composite)
    redis.call('ZREM', KEYS[1], composite)
    redis.call('ZREM', ARGV[5] .. id, execution)
    answer[#answer + 1] = 0
  end
end
for _, composite in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  if redis.call('EXISTS', ARGV[4] .. composite) == 0 then redis.call('SREM', KEYS[2], composite) end
end
redis.call('PEXPIRE', KEYS[2], lease_ms + 60000)
return answer
