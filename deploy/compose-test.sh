#!/usr/bin/env bash
# docker-compose.yml really brought up: images built, 16 workers, the small real model, one worker container killed while it plays,
# `rq info` from a container, workers stopped; then the oracle: every admitted item settled once, the archive complete.
#   ITEMS=64 WORKERS=16 deploy/compose-test.sh         the report goes to standard output, the rest to standard error
# Leaves nothing behind but the images.
set -euo pipefail
cd "$(dirname "$0")/.."
ITEMS=${ITEMS:-64} WORKERS=${WORKERS:-16} WAIT_S=${WAIT_S:-1500}
RUN=demo POOL=default
REDIS_PASSWORD=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export ITEMS REDIS_PASSWORD
export COMPOSE_PROJECT_NAME="distaff-test-$$" COMPOSE_FILE=docker-compose.yml:deploy/compose-test.yml COMPOSE_PROFILES=demo
export RUN_FILE=./deploy/run.toml

docker compose version >/dev/null 2>&1 || { echo "docker compose (version 2.24 or newer) is needed, and a running engine" >&2; exit 2; }

say() { printf '%s %4ds  %s\n' "compose-test" "$SECONDS" "$*" >&2; }
redis() { docker compose exec -T redis redis-cli "$@"; }
state() { redis hget "distaff:run:$RUN:state" "$1"; }
containers() { docker ps --quiet --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" "$@"; }

fail() {
  say "FAILED: $*"
  docker compose ps --all >&2 || true
  docker compose logs --tail 15 >&2 || true
  exit 1
}

tear_down() {
  code=$?
  docker compose down --volumes --remove-orphans --timeout 20 >/dev/null 2>&1 || true
  if [ -n "$(containers --all)$(docker volume ls --quiet --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME")" ]; then
    say "FAILED: containers or volumes are left behind"
    code=1
  fi
  exit "$code"
}
trap tear_down EXIT

wait_until() { # seconds, what, command...
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    [ "$SECONDS" -lt "$end" ] || fail "$what: not within the time"
    sleep 1
  done
}

say "building"
docker compose build --quiet >&2
built_s=$SECONDS

say "starting redis, the engine, $WORKERS workers"
docker compose up --detach --quiet-pull --wait --wait-timeout 900 --scale "worker=$WORKERS" redis demo-engine worker >/dev/null 2>&1 \
  || fail "not all services became healthy"
ready_s=$((SECONDS - built_s))
[ "$(containers --filter label=com.docker.compose.service=worker --filter health=healthy | wc -l)" = "$WORKERS" ] || fail "not $WORKERS healthy workers"

say "producing $ITEMS items"
began=$SECONDS
docker compose up --detach --no-recreate --no-deps producer archiver >/dev/null 2>&1

some_emitted() { [ "$(state emitted)" -ge $((ITEMS / 8)) ] 2>/dev/null; }
wait_until "$WAIT_S" "the first groups" some_emitted

rq_info=$(docker compose exec -T worker rq info --queue-class distaff_worker.rq_schema.JSONQueue)
rq_workers=$(grep -oE '^[0-9]+ workers' <<<"$rq_info" | cut -d' ' -f1)
[ "$rq_workers" = "$WORKERS" ] || { echo "$rq_info" >&2; fail "rq info sees ${rq_workers:-no} workers"; }
say "rq info: $(grep -E 'executing|jobs total' <<<"$rq_info" | xargs)"

# A container's host name is its id.
find_busy() {
  local key
  for key in $(redis smembers rq:workers); do
    if [ "$(redis hget "$key" running)" -gt 0 ] 2>/dev/null; then
      victim=$(redis hget "$key" hostname)
      return
    fi
  done
  return 1
}
wait_until 60 "a worker that plays" find_busy
docker kill "$victim" >/dev/null
killed_at=$SECONDS
say "killed worker container $victim"
lease_lost() { [ "$(state lost)" -ge 1 ] 2>/dev/null; }
wait_until 60 "the killed worker's groups back on the queue" lease_lost
recovered_s=$((SECONDS - killed_at))

ended() { [ -z "$(containers --filter label=com.docker.compose.service=archiver)" ]; }
memory_mib=$(docker stats --no-stream --format '{{.Name}} {{.MemUsage}}' $(containers --filter label=com.docker.compose.service=worker) \
  | awk '{v=$2; u=v; sub(/[A-Za-z]+/, "", v); sub(/[0-9.]+/, "", u); t += u == "GiB" ? v * 1024 : v} END {printf "%d", t / NR}')
wait_until "$WAIT_S" "the end of the run" ended
run_s=$((SECONDS - began))
for role in producer archiver; do
  code=$(docker inspect --format '{{.State.ExitCode}}' "$(docker compose ps --all --quiet "$role")")
  [ "$code" = 0 ] || fail "the $role ended with exit code $code"
done

say "checking"
figures=$(docker compose run --rm -T --no-deps --entrypoint python3 archiver - "$RUN" "$POOL" <deploy/compose_oracle.py) || fail "the oracle: $figures"

say "stopping the workers"
stop_began=$SECONDS
docker compose stop worker >/dev/null 2>&1
stopped_s=$((SECONDS - stop_began))
codes=$(docker inspect --format '{{.State.ExitCode}}' $(docker compose ps --all --quiet worker) | sort | uniq -c | awk '{printf "%s%s x %s", s, $2, $1; s = ", "}')
[ "$codes" = "0 x $((WORKERS - 1)), 137 x 1" ] || fail "exit codes of the workers: $codes (137 is the killed one)"

image_mib() { docker image inspect --format '{{.Size}}' "$1" | awk '{printf "%d", $1 / 1048576}'; }
cat <<REPORT
workers                    $WORKERS containers, $memory_mib MiB each
images                     $(for role in producer worker archiver demo-engine; do printf '%s %s MiB  ' "$role" "$(image_mib "distaff-$role")"; done)
build, start to healthy    $built_s s, $ready_s s
run                        $run_s s
figures                    $figures
killed                     one worker; its groups were back on the queue after $recovered_s s (lease 12 s)
rq info                    $rq_workers workers
stop of all workers        $stopped_s s; exit codes $codes
oracle                     admitted == emitted + dead, no id twice, archive complete, nothing leased
REPORT
