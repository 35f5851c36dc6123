-- Settle an item that an operator canceled through RQ as a dead letter of kind `stopped`, and show it to RQ as a stopped job among the
-- failed ones, from where `rq requeue` brings it back. Idempotent: what is not canceled any more is only taken off the list.
-- RQ's cancel is not atomic: a worker may have settled the item meanwhile (then it is what it was), or still hold its lease (then the
-- lease ends here; the worker's next beat tells it).
-- HSET is the first write of the settlement, so that a full Redis refuses the whole script.
-- KEYS  1 job hash  2 canceled zset  3 wip zset  4 the job's executions zset  5 failed zset  6 finished zset  7 dead-letter hash
--       8 run state hash  9 settled bitmap  10 the job's results stream
-- ARGV  1 job id  2 seq  3 ISO time  4 the dead letter as JSON  5 RQ result: exception, packed  6 worker name  7 execution key prefix
-- returns 'buried', 'settled' (it had been emitted, or had a letter), 'gone' (its run is not there), or 'moved' (not canceled any more)
local job = redis.call('HMGET', KEYS[1], 'status', 'distaff_exec', 'failure_ttl', 'result_ttl')
local verdict
if job[1] ~= 'canceled' then verdict = 'moved'
elseif tonumber(redis.call('HGET', KEYS[8], 'admitted') or '0') <= tonumber(ARGV[2]) then verdict = 'gone'
elseif redis.call('GETBIT', KEYS[9], ARGV[2]) == 1 then verdict = 'settled'
else verdict = 'buried' end

local letter = verdict == 'settled' and redis.call('HEXISTS', KEYS[7], ARGV[2]) == 1
if verdict == 'buried' then
  redis.call('HSET', KEYS[7], ARGV[2], ARGV[4])
  redis.call('SETBIT', KEYS[9], ARGV[2], 1)
  redis.call('HINCRBY', KEYS[8], 'dead', 1)
  redis.call('XADD', KEYS[10], 'MAXLEN', 10, '*', 'type', '2', 'worker_name', ARGV[6], 'exc_string', ARGV[5])
  redis.call('EXPIRE', KEYS[10], tonumber(job[3] or '604800'))
end
if verdict == 'buried' or verdict == 'settled' then
  local ended = verdict == 'buried' or letter
  local ttl = tonumber(ended and (job[3] or '604800') or job[4] or '600')
  redis.call('HSET', KEYS[1], 'status', ended and 'stopped' or 'finished', 'ended_at', ARGV[3])
  redis.call('EXPIRE', KEYS[1], ttl)
  redis.call('ZADD', ended and KEYS[5] or KEYS[6], redis.call('TIME')[1] + ttl, ARGV[1])
elseif verdict == 'gone' then
  redis.call('DEL', KEYS[1])
end
if verdict ~= 'moved' and job[2] then
  redis.call('DEL', ARGV[7] .. ARGV[1] .. ':' .. job[2])
  redis.call('ZREM', KEYS[3], ARGV[1] .. ':' .. job[2])
  redis.call('ZREM', KEYS[4], job[2])
end
redis.call('ZREM', KEYS[2], ARGV[1])
return verdict
