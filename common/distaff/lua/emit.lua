-- Settle an item with its scored group: append to the stream, finish the job, set the settled bit and count, all or nothing.
-- Idempotent: sent again after a lost reply it answers 'already'. XADD is the first write, so that a full Redis refuses the
-- whole script before anything changed.
-- KEYS  1 job hash  2 wip zset  3 the job's executions zset  4 execution hash  5 the worker's executions set  6 worker hash
--       7 finished zset  8 group stream  9 run state hash  10 settled bitmap
-- ARGV  1 execution id  2 job id  3 seq  4 ISO time  5 rollouts  6 samples  7 tokens  8 trained tokens  9 reward sum
--       10 reward count  11 seconds worked  12.. stream fields and values
-- returns 'emitted', 'already' (by this execution), 'settled' (by another), 'lost' (not the owner any more) or 'gone' (job or run; also
--         when the run was opened anew and has not admitted the item in this life)
local job = redis.call('HMGET', KEYS[1], 'status', 'distaff_exec', 'distaff_settled', 'result_ttl')
local composite = ARGV[2] .. ':' .. ARGV[1]
local verdict
if not job[1] then verdict = 'gone'
elseif job[3] == ARGV[1] then return 'already'
elseif redis.call('GETBIT', KEYS[10], ARGV[3]) == 1 then verdict = 'settled'
elseif job[1] ~= 'started' or job[2] ~= ARGV[1] then verdict = 'lost'
elseif tonumber(redis.call('HGET', KEYS[9], 'admitted') or '0') <= tonumber(ARGV[3]) then verdict = 'gone'
else verdict = 'emitted' end

if verdict == 'emitted' then
  redis.call('XADD', KEYS[8], '*', unpack(ARGV, 12))
  redis.call('SETBIT', KEYS[10], ARGV[3], 1)
  redis.call('HINCRBY', KEYS[9], 'emitted', 1)
  redis.call('HINCRBY', KEYS[9], 'rollouts', ARGV[5])
  redis.call('HINCRBY', KEYS[9], 'samples', ARGV[6])
  redis.call('HINCRBY', KEYS[9], 'tokens', ARGV[7])
  redis.call('HINCRBY', KEYS[9], 'trained_tokens', ARGV[8])
  redis.pcall('HINCRBYFLOAT', KEYS[9], 'reward_sum', ARGV[9]) -- a number out of range must not end the script half way
  redis.call('HINCRBY', KEYS[9], 'reward_count', ARGV[10])
  local ttl = tonumber(job[4] or '600')
  redis.call('HSET', KEYS[1], 'status', 'finished', 'ended_at', ARGV[4], 'distaff_settled', ARGV[1])
  redis.call('EXPIRE', KEYS[1], ttl)
  redis.call('ZADD', KEYS[7], redis.call('TIME')[1] + ttl, ARGV[2])
  redis.call('DEL', KEYS[3]) -- RQ's own clean-up takes a dead execution off the registry and leaves it in this list
  redis.call('HINCRBY', KEYS[6], 'successful_job_count', 1)
  redis.call('HINCRBYFLOAT', KEYS[6], 'total_working_time', ARGV[11])
end
if verdict == 'gone' then redis.call('DEL', KEYS[1]) end
redis.call('DEL', KEYS[4])
redis.call('ZREM', KEYS[2], composite)
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('SREM', KEYS[5], composite)
return verdict
