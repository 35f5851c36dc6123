-- Put an item that was admitted and got lost back on the queue: its job hash is gone, or says queued while the queue does not hold it
-- (`rq empty`, a deleted key). An item that is queued, leased, failed or settled is left alone, so it may be sent for any item.
-- HSET is the first write, so that a full Redis refuses the whole script.
-- KEYS  1 run state hash  2 settled bitmap  3 queue list  4 set of queues  5 job hash
-- ARGV  1 seq  2 job id  3.. fields and values of the job hash
-- returns 1 when it was put back, else 0
local admitted = redis.call('HGET', KEYS[1], 'admitted')
if not admitted or tonumber(admitted) <= tonumber(ARGV[1]) or redis.call('GETBIT', KEYS[2], ARGV[1]) == 1 then return 0 end
local status = redis.call('HGET', KEYS[5], 'status')
if status and (status ~= 'queued' or redis.call('LPOS', KEYS[3], ARGV[2])) then return 0 end
if not status then redis.call('HSET', KEYS[5], unpack(ARGV, 3)) end
redis.call('SADD', KEYS[4], KEYS[3])
redis.call('RPUSH', KEYS[3], ARGV[2])
return 1
