-- Settle an item as a dead letter, and show it to RQ as a failed (or stopped) job. Idempotent like emit.lua.
-- A job that belongs to no run (somebody else's, on our queue) has no seq and only becomes a failed job.
-- KEYS  1 job hash  2 wip zset  3 the job's executions zset  4 execution hash  5 the worker's executions set  6 worker hash
--       7 failed zset  8 dead-letter hash  9 run state hash  10 settled bitmap  11 the job's results stream
-- ARGV  1 execution id  2 job id  3 seq or ""  4 ISO time  5 the dead letter as JSON  6 RQ status  7 RQ result: exception, packed
--       8 worker name  9 1 when the run's filter dropped the group, else 0  10 seconds worked
-- returns 'buried', 'already', 'settled', 'lost' or 'gone'
local job = redis.call('HMGET', KEYS[1], 'status', 'distaff_exec', 'distaff_settled', 'failure_ttl')
local composite = ARGV[2] .. ':' .. ARGV[1]
local ours, verdict = ARGV[3] ~= ''
if not job[1] then verdict = 'gone'
elseif job[3] == ARGV[1] then return 'already'
elseif ours and redis.call('GETBIT', KEYS[10], ARGV[3]) == 1 then verdict = 'settled'
elseif job[1] ~= 'started' or job[2] ~= ARGV[1] then verdict = 'lost'
elseif ours and tonumber(redis.call('HGET', KEYS[9], 'admitted') or '0') <= tonumber(ARGV[3]) then verdict = 'gone'
else verdict = 'buried' end

if verdict == 'buried' then
  local ttl = tonumber(job[4] or '604800')
  if ours then
    redis.call('HSET', KEYS[8], ARGV[3], ARGV[5])
    redis.call('SETBIT', KEYS[10], ARGV[3], 1)
    redis.call('HINCRBY', KEYS[9], 'dead', 1)
    if ARGV[9] == '1' then redis.call('HINCRBY', KEYS[9], 'dropped', 1) end
  end
  redis.call('HSET', KEYS[1], 'status', ARGV[6], 'ended_at', ARGV[4], 'distaff_settled', ARGV[1])
  redis.call('EXPIRE', KEYS[1], ttl)
  redis.call('ZADD', KEYS[7], redis.call('TIME')[1] + ttl, ARGV[2])
  redis.call('XADD', KEYS[11], 'MAXLEN', 10, '*', 'type', '2', 'worker_name', ARGV[8], 'exc_string', ARGV[7],
             'execution_id', ARGV[1])
  redis.call('EXPIRE', KEYS[11], ttl)
  redis.call('DEL', KEYS[3]) -- RQ's own clean-up takes a dead execution off the registry and leaves it in this list
  redis.call('HINCRBY', KEYS[6], 'failed_job_count', 1)
  redis.call('HINCRBYFLOAT', KEYS[6], 'total_working_time', ARGV[10])
end
if verdict == 'gone' then redis.call('DEL', KEYS[1]) end
redis.call('DEL', KEYS[4])
redis.call('ZREM', KEYS[2], composite)
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('SREM', KEYS[5], composite)
return verdict
