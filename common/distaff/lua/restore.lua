-- Put an item that was admitted and got lost back on the queue: its job hash is gone, or says queued while the queue does not hold it
-- (`rq empty`, a deleted key), or started while no lease is left (wiped by `rq info` with a wrong clock, then the worker died). An
-- item that is queued, leased, failed or settled is left alone, so it may be sent for any item. One that RQ calls canceled and has no list
-- of canceled jobs for (its Job.delete broke off half way) is put on that list, where workers find and settle it.
-- HSET is the first write, so that a full Redis refuses the whole script.
-- KEYS  1 run state hash  2 settled bitmap  3 queue list  4 set of queues  5 job hash  6 wip zset  7 canceled zset
-- ARGV  1 seq  2 job id  3 execution key prefix  4.. fields and values of the job hash
-- returns 1 when it was put back, else 0
local admitted = redis.call('HGET', KEYS[1], 'admitted')
if not admitted or tonumber(admitted) <= tonumber(ARGV[1]) or redis.call('GETBIT', KEYS[2], ARGV[1]) == 1 then return 0 end
local job = redis.call('HMGET', KEYS[5], 'status', 'distaff_exec')
local composite = ARGV[2] .. ':' .. (job[2] or '')
if job[1] == 'queued' then
  if redis.call('LPOS', KEYS[3], ARGV[2]) then return 0 end
elseif job[1] == 'started' and job[2] then
  if redis.call('ZSCORE', KEYS[6], composite) or redis.call('EXISTS', ARGV[3] .. composite) == 1 then return 0 end
  redis.call('HSET', KEYS[5], 'status', 'queued')
  redis.call('HDEL', KEYS[5], 'distaff_exec', 'started_at')
elseif job[1] == 'canceled' then
  redis.call('ZADD', KEYS[7], 'NX', redis.call('TIME')[1], ARGV[2])
  return 0
elseif job[1] then
  return 0
else
  redis.call('HSET', KEYS[5], unpack(ARGV, 4))
end
redis.call('SADD', KEYS[4], KEYS[3])
redis.call('RPUSH', KEYS[3], ARGV[2])
return 1
