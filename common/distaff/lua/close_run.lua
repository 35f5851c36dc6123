-- Say that nothing more will be admitted, unless another producer admitted something meanwhile. Idempotent.
-- KEYS  1 run state hash
-- ARGV  1 expected cursor
-- returns {'closed' | 'moved' | 'missing', cursor}
local state = redis.call('HMGET', KEYS[1], 'status', 'admitted')
if not state[1] then return {'missing', 0} end
local cursor = tonumber(state[2] or '0')
if state[1] == 'closed' then return {'closed', cursor} end
if cursor ~= tonumber(ARGV[1]) then return {'moved', cursor} end
local clock = redis.call('TIME')
redis.call('HSET', KEYS[1], 'status', 'closed', 'target', cursor,
           'closed', clock[1] .. '.' .. string.format('%06d', clock[2]))
return {'closed', cursor}
