-- Take the jobs of one run off a queue and keep the order of the others. A queue left empty is unregistered, unless one of its
-- registries still holds something of another run, which could not be found without it.
-- KEYS  1 queue list  2 set of queues  3.. the queue's registries
-- ARGV  1 run
-- returns how many entries were taken off
-- (run, seq) of a job id of ours, as `distaff.keys.parse_job_id`; nil for any other.
local function place(id)
  local run, digits = string.match(id, '^(.+)%-(%d%d%d%d%d%d%d%d%d+)$')
  if not run or #run > 64 or not string.match(run, '^%w[%w_%-]*$') then return nil end
  local seq = tonumber(digits)
  if seq > 4294967295 or string.format('%09.0f', seq) ~= digits then return nil end
  return run, seq
end

local kept, taken = {}, 0
for _, id in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
  if place(id) == ARGV[1] then
    taken = taken + 1
  else
    kept[#kept + 1] = id
  end
end
if taken > 0 then
  redis.call('DEL', KEYS[1])
  for _, id in ipairs(kept) do redis.call('RPUSH', KEYS[1], id) end
end
if redis.call('EXISTS', KEYS[1], unpack(KEYS, 3)) == 0 then redis.call('SREM', KEYS[2], KEYS[1]) end
return taken
