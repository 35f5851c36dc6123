-- Give up one delivery: copy the entry to the consumer group's stream of parked entries and acknowledge it, if it is pending.
-- KEYS[1]  group stream
-- KEYS[2]  stream of parked entries of this consumer group
-- ARGV[1]  name of the consumer group
-- ARGV[2]  id of the entry
-- ARGV[3]  consumer that gives it up
-- ARGV[4]  reason, one line
-- Adds the entry's own fields and entry, consumer, reason, deliveries.
-- Returns 1, or 0 when the entry is not pending any more (another consumer dealt with it).
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[2], ARGV[2], 1)
if #pending == 0 then
  return 0
end
local found = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2])
if #found == 1 then
  local fields = {'entry', ARGV[2], 'consumer', ARGV[3], 'reason', ARGV[4], 'deliveries', pending[1][4]}
  for i = 1, math.min(#found[1][2], 128) do -- ours have 9 fields, 18 values
    fields[#fields + 1] = found[1][2][i]
  end
  redis.call('XADD', KEYS[2], '*', unpack(fields))
end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
return 1
