-- Take a dead letter back and put its item on the queue again, with all its attempts; all or nothing. Idempotent: sent again it finds no
-- letter and an item that is not settled. The settled bit goes with the letter, so the run is not ended until the item is settled anew.
-- A job that is there is played as it is; one that is gone is made anew. HSET is the first write, so that a full Redis refuses the
-- whole script before anything changed.
-- KEYS  1 run state hash  2 settled bitmap  3 dead-letter hash  4 job hash  5 queue list  6 set of queues  7 failed zset  8 canceled zset
-- ARGV  1 seq  2 job id  3 ISO time  4.. fields and values of the job hash, none when the letter does not hold the item
-- returns 'queued', 'underway' (not settled: on the queue or being played), 'none' (settled and no dead letter) or 'gone' (the job is, and
--         the letter does not hold the item)
local letter = redis.call('HGET', KEYS[3], ARGV[1])
if not letter then return redis.call('GETBIT', KEYS[2], ARGV[1]) == 1 and 'none' or 'underway' end
local readable, content = pcall(cjson.decode, letter)
if redis.call('HEXISTS', KEYS[4], 'data') == 1 then
  redis.call('HSET', KEYS[4], 'status', 'queued', 'enqueued_at', ARGV[3])
  redis.call('HDEL', KEYS[4], 'distaff_attempts', 'distaff_lost', 'distaff_first', 'distaff_settled', 'distaff_exec', 'started_at',
             'ended_at')
  redis.call('PERSIST', KEYS[4])
elseif ARGV[4] then
  redis.call('HSET', KEYS[4], unpack(ARGV, 4))
else
  return 'gone'
end
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('SETBIT', KEYS[2], ARGV[1], 0)
redis.call('HINCRBY', KEYS[1], 'dead', -1)
if readable and type(content) == 'table' and content['kind'] == 'dropped' then redis.call('HINCRBY', KEYS[1], 'dropped', -1) end
redis.call('ZREM', KEYS[7], ARGV[2])
redis.call('ZREM', KEYS[8], ARGV[2])
redis.call('SADD', KEYS[6], KEYS[5])
if not redis.call('LPOS', KEYS[5], ARGV[2]) then redis.call('RPUSH', KEYS[5], ARGV[2]) end
return 'queued'
