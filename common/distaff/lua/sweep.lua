#!lua flags=allow-oom
-- Put items whose lease ran out back at the front of the queue. No lock: any number of workers may sweep at once.
-- How often an item was lost is counted on it; the worker that claims it decides when it was too often.
-- When nobody has swept for most of a lease, the server or all workers were away: leases that ran out meanwhile say nothing about
-- those who hold them, who get two beats' time to extend them first. An outage is charged to no item.
-- KEYS  1 wip zset  2 queue list  3 the pool's last sweep, "<when> <no sweeps until>"
-- ARGV  1 job key prefix  2 run key prefix  3 executions key prefix  4 most to look at  5 ISO time  6 lease in seconds; 0: no such time
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
local lease = tonumber(ARGV[6])
if lease > 0 then
  local last, quiet = string.match(redis.call('GET', KEYS[3]) or '', '^(%S+) (%S+)$')
  quiet = tonumber(quiet or 0)
  if now - tonumber(last or now) > 0.75 * lease then quiet = now + lease / 3 end
  redis.call('SET', KEYS[3], string.format('%.6f %.6f', now, quiet), 'EX', math.ceil(10 * lease) + 3600)
  if now < quiet then return back end
end
-- What is not ours to put back (a stock worker's job) is left in place and passed over, however much of it there is.
local limit, kept, looked = tonumber(ARGV[4]), 0, 0
while #back < limit and looked < 20 * limit do
  local page = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', kept, limit)
  if #page == 0 then break end
  looked = looked + #page
  for _, composite in ipairs(page) do
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
    if job[1] == 'started' and not job[2] then
      kept = kept + 1
    else
      redis.call('ZREM', KEYS[1], composite)
      if id then redis.call('ZREM', ARGV[3] .. id, execution) end
    end
  end
end
return back
