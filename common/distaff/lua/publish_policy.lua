-- Publish the policy version of a run; it never goes backwards.
-- KEYS[1]  hash of the policy (fields version, published)
-- ARGV[1]  the new version, a decimal integer >= 0
-- Returns 1 when the version is now ARGV[1] (also when it was already), 0 when a later one stands.
local standing = redis.call('HGET', KEYS[1], 'version') or '0'
local version = ARGV[1]

-- As decimal text, because Lua's numbers are exact only up to 2^53, and a version may be a time in nanoseconds.
local function below(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end
if below(version, standing) then
  return 0
end
if version ~= standing or redis.call('EXISTS', KEYS[1]) == 0 then
  local now = redis.call('TIME')
  redis.call('HSET', KEYS[1], 'version', ARGV[1], 'published', string.format('%d.%06d', now[1], now[2]))
end
return 1
