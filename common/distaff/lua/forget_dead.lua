-- Forget dead letters: their items stay settled and counted, and are never played again. A letter that is another by now (its item was
-- retried, and given up again) stays. Idempotent.
-- KEYS  1 dead-letter hash
-- ARGV  seq, the letter as it was read, ...
-- returns how many were forgotten
local forgotten = 0
for i = 1, #ARGV, 2 do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then forgotten = forgotten + redis.call('HDEL', KEYS[1], ARGV[i]) end
end
return forgotten
