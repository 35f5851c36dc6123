-- Acknowledge entries of the group stream, then free what every consumer group of it has acknowledged.
-- Never frees what some group has not read, or has read and not acknowledged; a group created later sees what is left.
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

-- What lies before the first entry that some group still needs goes in one trim.
local groups, first = {}, nil
for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = {}
  for i = 1, #info, 2 do group[info[i]] = info[i + 1] end
  groups[#groups + 1] = group
  local pending = redis.call('XPENDING', KEYS[1], group.name, '-', '+', 1)
  local needed = pending[1] and pending[1][1] or after(group['last-delivered-id'])
  if first == nil or earlier(needed, first) then first = needed end
end
if first == nil then
  return {acknowledged, 0}
end
local freed = redis.call('XTRIM', KEYS[1], 'MINID', '=', first)

-- Of the entries behind it those that were acknowledged just now may be free as well.
local function needed_by_none(id)
  for _, group in ipairs(groups) do
    if earlier(group['last-delivered-id'], id) or #redis.call('XPENDING', KEYS[1], group.name, id, id, 1) > 0 then
      return false
    end
  end
  return true
end
for i = 2, #ARGV do
  if not earlier(ARGV[i], first) and needed_by_none(ARGV[i]) then
    freed = freed + redis.call('XDEL', KEYS[1], ARGV[i])
  end
end
return {acknowledged, freed}
