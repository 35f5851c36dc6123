-- Take the jobs of one run off a queue and keep the order of the others; a queue left empty is unregistered.
-- KEYS  1 queue list  2 set of queues
-- ARGV  1 beginning of the run's job ids, "<run>-"; the rest of such an id is nine or more digits
-- returns how many entries were taken off
local kept, taken = {}, 0
for _, id in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
  if string.sub(id, 1, #ARGV[1]) == ARGV[1] and string.match(string.sub(id, #ARGV[1] + 1), '^%d%d%d%d%d%d%d%d%d+$') then
    taken = taken + 1
  else
    kept[#kept + 1] = id
  end
end
if taken > 0 then
  redis.call('DEL', KEYS[1])
  for _, id in ipairs(kept) do redis.call('RPUSH', KEYS[1], id) end
end
if #kept == 0 then redis.call('SREM', KEYS[2], KEYS[1]) end
return taken
