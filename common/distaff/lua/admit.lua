-- Put a batch of jobs on the queue and advance the run's cursor, all or nothing, as far as the window has room.
-- The cursor is the guard: a batch made for another cursor writes nothing, so that sending again after a lost reply, running again
-- after a crash and a second producer are all the same harmless case. HSET is the first write, so that a full Redis refuses the
-- whole script before anything changed. A job hash is made anew: nothing of an older job of that id survives in it.
-- KEYS  1 run state hash  2 group stream  3 queue list  4 set of queues  5.. job hashes, in order
-- ARGV  1 expected cursor  2 window  3 items the producer intends to admit, "" while unknown
--       4.. for each job: id, "1" to push it to the front else "0", number of fields and values, fields and values
-- returns {status, cursor, room left}; status is
--   'admitted' (the first `cursor - expected` jobs), 'full' (none: no room), 'moved' (none: the cursor is another),
--   'closed' (none: the run is), 'missing' (none: there is no such run)
local state = redis.call('HMGET', KEYS[1], 'status', 'admitted', 'emitted', 'dead')
if not state[1] then return {'missing', 0, 0} end
local cursor = tonumber(state[2] or '0')
local unsettled = cursor - tonumber(state[3] or '0') - tonumber(state[4] or '0')
local room = tonumber(ARGV[2]) - unsettled - redis.call('XLEN', KEYS[2])
if state[1] ~= 'open' then return {'closed', cursor, room} end
if cursor ~= tonumber(ARGV[1]) then return {'moved', cursor, room} end
local count = math.min(#KEYS - 4, room)
if count < 1 then return {'full', cursor, room} end

redis.call('HSET', KEYS[1], 'admitted', cursor + count)
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'target', ARGV[3]) end
redis.call('SADD', KEYS[4], KEYS[3])
local at = 4
for i = 1, count do
  local last = at + 2 + tonumber(ARGV[at + 2])
  redis.call('DEL', KEYS[4 + i])
  redis.call('HSET', KEYS[4 + i], unpack(ARGV, at + 3, last))
  redis.call(ARGV[at + 1] == '1' and 'LPUSH' or 'RPUSH', KEYS[3], ARGV[at])
  at = last + 1
end
return {'admitted', cursor + count, room - count}
