-- Acknowledge entries of the group stream, then free what every consumer group of it has acknowledged.
-- Frees only a prefix: entries before the first one that any group has not read or has read and not acknowledged. A group
-- created later sees what is left.
-- KEYS[1]  group stream
-- ARGV[1]  name of the consumer group that acknowledges
-- ARGV[2..] ids of the entries to acknowledge; may be none
-- Returns {entries acknowledged, entries freed}.
local acknowledged = 0
for i = 2, #ARGV do
  acknowledged = acknowledged + redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
end
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {acknowledged, 0}
end

local function earlier(a, b)
  local a_ms, a_n = string.match(a, '^(%d+)-(%d+)$')
  local b_ms, b_n = string.match(b, '^(%d+)-(%d+)$')
  if #a_ms ~= #b_ms then return #a_ms < #b_ms end
  if a_ms ~= b_ms then return a_ms < b_ms end
  if #a_n ~= #b_n then return #a_n < #b_n end
  return a_n < b_n
end

local function after(id)
  local ms, n = string.match(id, '^(%d+)-(%d+)$')
  if #n > 15 then return id end -- beyond exact numbers: keep one entry more
  return ms .. '-' .. string.format('%.0f', tonumber(n) + 1)
end

local first -- the first entry that some group still needs
for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local name, delivered
  for i = 1, #info, 2 do
    if info[i] == 'name' then name = info[i + 1] end
    if info[i] == 'last-delivered-id' then delivered = info[i + 1] end
  end
  local pending = redis.call('XPENDING', KEYS[1], name, '-', '+', 1)
  local needed = pending[1] and pending[1][1] or after(delivered)
  if first == nil or earlier(needed, first) then first = needed end
end
if first == nil then
  return {acknowledged, 0}
end
return {acknowledged, redis.call('XTRIM', KEYS[1], 'MINID', '=', first)}
