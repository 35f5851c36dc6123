-- Pop and lease up to n items in one step: an item is in the list or leased, never in between.
-- Leases are on the server's clock. An item that is settled already is not played again; one whose dead letter an operator
-- put back on the queue stops being a dead letter here.
-- An item that was lost with its worker twice or more is a suspect: a worker plays one suspect at a time, so that one that kills
-- workers does not drag the others that were lost with it down to their own limit. A suspect that must wait goes to the back,
-- and so do the items of runs that this worker cannot play, which others of its pool may be able to.
-- KEYS  1 queue list  2 wip zset  3 the worker's executions set  4 worker hash  5 finished zset  6 suspended flag
-- ARGV  1 n  2 job key prefix  3 execution key prefix  4 executions key prefix  5 worker name  6 ISO time  7 lease in ms
--       8 run key prefix  9 suspects this worker plays already  10.. n execution ids, then the runs it refuses, each
--       "<run> <life>"; the life of a run is when it was opened, so that one that was opened anew is another run
-- returns 0 when suspended, else a list of {job id, execution id, data, attempts, lost, first attempt, policy version, life, time now}
if redis.call('EXISTS', KEYS[6]) == 1 then return 0 end
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local lease_ms, wanted = tonumber(ARGV[7]), tonumber(ARGV[1])
local suspects, looks = tonumber(ARGV[9]), redis.call('LLEN', KEYS[1])
local claimed, refused = {}, {}
for i = 10 + wanted, #ARGV do refused[ARGV[i]] = true end

-- (run, seq) of a job id of ours, as `distaff.keys.parse_job_id`; nil for any other.
local function place(id)
  local run, digits = string.match(id, '^(.+)%-(%d%d%d%d%d%d%d%d%d+)$')
  if not run or #run > 64 or not string.match(run, '^%w[%w_%-]*$') then return nil end
  local seq = tonumber(digits)
  if seq > 4294967295 or string.format('%09.0f', seq) ~= digits then return nil end
  return run, seq
end

-- A counter in a hash that anybody may have written: digits, else '0'.
local function count(value)
  return value and #value <= 19 and string.match(value, '^%d+$') or '0'
end

-- What the run says of an item: 'open' (play it), 'emitted', 'revived', or 'unknown' (the run was deleted; or it was opened anew, and
-- this is left over from its former life, because this one has not admitted the item yet).
local function standing(run, seq)
  local prefix = ARGV[8] .. run
  if tonumber(redis.call('HGET', prefix .. ':state', 'admitted') or '0') <= seq then return 'unknown' end
  if redis.call('GETBIT', prefix .. ':settled', seq) == 0 then return 'open' end
  local letter = redis.call('HGET', prefix .. ':dead', seq)
  if not letter then return 'emitted' end
  redis.call('HDEL', prefix .. ':dead', seq)
  redis.call('SETBIT', prefix .. ':settled', seq, 0)
  redis.call('HINCRBY', prefix .. ':state', 'dead', -1)
  local readable, content = pcall(cjson.decode, letter)
  if readable and type(content) == 'table' and content['kind'] == 'dropped' then redis.call('HINCRBY', prefix .. ':state', 'dropped', -1) end
  return 'revived'
end

while #claimed < wanted and looks > 0 do
  looks = looks - 1
  local id = redis.call('LPOP', KEYS[1])
  local job = ARGV[2] .. id
  local fields = redis.pcall('HMGET', job, 'status', 'result_ttl', 'data', 'distaff_lost')
  if fields['err'] then
    -- No hash: none of ours, and forgotten. A key this user may not read (ACL): for a worker that may.
    if not string.find(fields['err'], 'WRONGTYPE', 1, true) then redis.call('RPUSH', KEYS[1], id) end
    fields = {}
  end
  local suspect = tonumber(count(fields[4])) >= 2
  if suspect and suspects > 0 and fields[1] == 'queued' then
    redis.call('RPUSH', KEYS[1], id)
  elseif fields[1] == 'queued' and fields[3] then
    local run, seq = place(id)
    local life = run and redis.call('HGET', ARGV[8] .. run .. ':state', 'opened') or ''
    local mine = not (run and refused[run .. ' ' .. life])
    local state = run and mine and standing(run, seq) or 'foreign'
    if not mine then
      redis.call('RPUSH', KEYS[1], id)
    elseif state == 'emitted' then
      local ttl = tonumber(fields[2] or '') or 600
      redis.call('HSET', job, 'status', 'finished')
      redis.call('EXPIRE', job, ttl)
      redis.call('ZADD', KEYS[5], clock[1] + ttl, id)
    elseif state == 'unknown' then
      redis.call('DEL', job)
    else
      if state == 'revived' then redis.call('HDEL', job, 'distaff_attempts', 'distaff_lost', 'distaff_first', 'distaff_settled') end
      if suspect then suspects = suspects + 1 end
      local execution = ARGV[10 + #claimed]
      local composite = id .. ':' .. execution
      redis.call('HSETNX', job, 'distaff_first', now)
      redis.call('HSET', job, 'status', 'started', 'worker_name', ARGV[5], 'started_at', ARGV[6], 'last_heartbeat', ARGV[6],
                 'distaff_exec', execution)
      redis.call('PERSIST', job)
      redis.call('HSET', ARGV[3] .. composite, 'id', execution, 'job_id', id, 'created_at', now, 'last_heartbeat', now,
                 'worker_name', ARGV[5])
      redis.call('PEXPIRE', ARGV[3] .. composite, lease_ms)
      redis.call('ZADD', ARGV[4] .. id, now + lease_ms / 1000 + 60, execution)
      redis.call('PEXPIRE', ARGV[4] .. id, lease_ms + 60000)
      redis.call('ZADD', KEYS[2], now + lease_ms / 1000, composite)
      redis.call('SADD', KEYS[3], composite)
      local marks = redis.call('HMGET', job, 'distaff_attempts', 'distaff_lost', 'distaff_first')
      local first = string.match(marks[3], '^%d%d?%d?%d?%d?%d?%d?%d?%d?%d?%d?%d?%.?%d*$') or tostring(now)
      local version = run and redis.call('HGET', ARGV[8] .. run .. ':policy', 'version')
      claimed[#claimed + 1] = {id, execution, fields[3], count(marks[1]), count(marks[2]), first, count(version), life,
                               string.format('%.6f', now)}
    end
  end
end
if #claimed > 0 then
  redis.call('PEXPIRE', KEYS[3], lease_ms + 60000)
  if redis.call('EXISTS', KEYS[4]) == 1 then redis.call('HSET', KEYS[4], 'state', 'busy') end
end
return claimed
