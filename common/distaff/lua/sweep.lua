#!lua flags=allow-oom
-- Put items whose lease ran out back at the front of the queue. No lock: any number of workers may sweep at once.
-- How often an item was lost is counted on it; the worker that claims it decides when it was too often.
-- KEYS  1 wip zset  2 queue list
-- ARGV  1 job key prefix  2 run key prefix  3 executions key prefix  4 most to look at  5 ISO time
-- returns the job ids put back
-- (run, seq) of a job id of ours, as `distaff.keys.parse_job_id`; nil for any other.
local function place(id)
  local run, digits = string.match(id, '^(.+)%-(%d%d%d%d%d%d%d%d%d+)$')
  if not run or #run > 64 or not string.match(run, '^%w[%w_%-]*$') then return nil end
  local seq = tonumber(digits)
  if seq > 4294967295 or string.format('%09.0f', seq) ~= digits then return nil end
  return run, seq
end

local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local back = {}
for _, composite in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[4])) do
  local id, execution = string.match(composite, '^([^:]+):(.+)$')
  local job = id and redis.call('HMGET', ARGV[1] .. id, 'status', 'distaff_exec') or {}
  if job[1] == 'started' and job[2] == execution then
    redis.call('HINCRBY', ARGV[1] .. id, 'distaff_lost', 1)
    redis.call('HSET', ARGV[1] .. id, 'status', 'queued', 'enqueued_at', ARGV[5])
    redis.call('HDEL', ARGV[1] .. id, 'distaff_exec', 'started_at')
    redis.call('LPUSH', KEYS[2], id)
    back[#back + 1] = id
    local run = place(id)
    if run and redis.call('EXISTS', ARGV[2] .. run .. ':state') == 1 then
      redis.call('HINCRBY', ARGV[2] .. run .. ':state', 'lost', 1)
    end
  end
  if job[1] ~= 'started' or job[2] then
    redis.call('ZREM', KEYS[1], composite)
    if id then redis.call('ZREM', ARGV[3] .. id, execution) end
  end
end
return back
