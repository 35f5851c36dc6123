"""The mechanisms behind the promises, and how each is switched off. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """`old`, which occurs once in `file`, becomes `new`; then `test` (arguments of pytest) has to fail."""

    promise: str
    what: str
    file: str
    old: str
    new: str
    test: str


HOSTING = "worker/distaff_worker/hosting"

MUTATIONS: list[Mutation] = [
    Mutation(
        promise="P13",
        what="the culprit of a crash is not known",
        file=f"{HOSTING}/process.py",
        old="return frozenset({self._board.running(slot) for slot in slots} - {0})",
        new="return frozenset()",
        test="tests/test_hosting.py::test_code_that_ends_its_process_is_one_dead_letter",
    ),
    Mutation(
        promise="P13",
        what="no bound on the memory of an environment's process",
        file=f"{HOSTING}/host.py",
        old='    _limit_memory(opening["memory_bytes"])\n',
        new="    _limit_memory(8 << 30)\n",
        test="tests/test_hosting.py::test_an_item_that_exhausts_memory_gets_a_memory_error_and_the_others_go_on",
    ),
    Mutation(
        promise="P15",
        what="a process that blocks is not killed",
        file=f"{HOSTING}/process.py",
        old="        if await self._holder(slot) == group:\n",
        new="        if False:\n",
        test="tests/test_hosting.py::test_a_reward_that_blocks_is_killed_and_costs_nobody_else_anything",
    ),
    Mutation(
        promise="P15",
        what="the watchdog of a process does not bark",
        file=f"{HOSTING}/watchdog.py",
        old="            if self.silent_s > self._limit_s:\n                await",
        new="            if self.silent_s > 1e9:\n                await",
        test="tests/test_hosting.py::test_a_step_that_blocks_is_killed_and_costs_nobody_else_anything",
    ),
    Mutation(
        promise="P15",
        what="groups of a lost process are not played again",
        file="worker/distaff_worker/job.py",
        old="            if place.blamed and place.loss:\n",
        new="            if place.loss:\n",
        test="tests/test_hosting.py::test_a_reward_that_blocks_is_killed_and_costs_nobody_else_anything",
    ),
    Mutation(
        promise="P15",
        what="a loop of the worker that stands still is not noticed",
        file="worker/distaff_worker/command.py",
        old="faulthandler.dump_traceback_later(STUCK_LEASES * worker.lease_s, exit=True)",
        new="None",
        test="tests/test_broken_parts.py::test_a_worker_whose_loop_stands_still_writes_its_stacks_and_ends",
    ),
    Mutation(
        promise="P16",
        what="processes that have grown are kept",
        file=f"{HOSTING}/environment.py",
        old="            member.retired = True\n",
        new="            pass\n",
        test="tests/test_hosting.py::test_items_that_leak_are_played_in_processes_that_are_replaced",
    ),
    Mutation(
        promise="P16",
        what="a worker that has grown goes on",
        file="worker/distaff_worker/service.py",
        old="        while not self._stopping.is_set() and not self._overgrown():\n",
        new="        while not self._stopping.is_set():\n",
        test="tests/test_service.py::test_a_worker_that_has_grown_ends_and_leaves_the_rest",
    ),
    Mutation(
        promise="P17",
        what="the kernel does not end what a killed worker has started",
        file=f"{HOSTING}/zygote.py",
        old="        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)\n",
        new="        pass\n",
        test="tests/test_kill.py::test_a_killed_worker_leaves_no_process_behind",
    ),
    Mutation(
        promise="P17",
        what="what an environment has started is not killed with it",
        file=f"{HOSTING}/process.py",
        old="            os.killpg(self.pid, signal.SIGKILL)\n",
        new="            os.kill(self.pid, signal.SIGKILL)\n",
        test="tests/test_hosting.py::test_what_an_environment_started_ends_with_it",
    ),
    Mutation(
        promise="P7",
        what="a group in hand is acknowledged behind its user's back when it is made again",
        file="common/distaff/consuming.py",
        old="        if seq not in self._held.values():\n",
        new="        if True:\n",
        test="tests/test_durability.py::test_a_group_in_hand_that_is_made_again_stays_the_callers_until_it_acknowledges",
    ),
    Mutation(
        promise="P7",
        what="an acknowledgement that Redis forgot is not given again",
        file="common/distaff/consuming.py",
        old="if counts.pop(self.name, 0) and (yield from self._unknown_are_ours()):",
        new="if counts.pop(self.name, 0) > len(self._held):",
        test="tests/test_durability.py::test_an_acknowledgement_that_redis_forgot_is_given_again",
    ),
    Mutation(
        promise="P7",
        what="a group that was made again after a loss is taken for the one that was seen",
        file="common/distaff/consuming.py",
        old="if group.seq in self._seen and not (yield from self._run_began_anew()):",
        new="if False:",
        test="tests/test_durability.py::test_a_log_that_lost_its_end_costs_work_and_no_item",
    ),
    Mutation(
        promise="P7",
        what="expired leases are not swept",
        file="worker/distaff_worker/service.py",
        old="self._sweeper.sweep)",
        new="lambda: None)",
        test="tests/test_durability.py::test_a_log_that_lost_its_end_costs_work_and_no_item",
    ),
    Mutation(
        promise="P7",
        what="a producer takes a run that is gone for a passing failure",
        file="producer/distaff_producer/produce.py",
        old="        if standing is None:\n            raise self._gone()",
        new="        if standing is None:\n            raise redis.exceptions.ConnectionError",
        test="tests/test_durability.py::test_a_redis_that_keeps_no_log_loses_the_run_and_says_so",
    ),
    Mutation(
        promise="P1",
        what="the settled bit is not set",
        file="common/distaff/lua/emit.lua",
        old="redis.call('SETBIT', KEYS[10], ARGV[3], 1)",
        new="redis.call('SETBIT', KEYS[10], ARGV[3], 0)",
        test="tests/test_durability.py::test_a_redis_that_is_restarted_again_and_again_costs_nothing",
    ),
    Mutation(
        promise="P8",
        what="an evicting Redis is accepted",
        file="common/distaff/safety.py",
        old='    if policy != "noeviction":',
        new="    if False:",
        test="tests/test_redis_kinds.py::test_a_redis_that_may_evict_is_refused",
    ),
    Mutation(
        promise="P8",
        what="leases are not extended while Redis is full",
        file="common/distaff/lua/beat.lua",
        old="#!lua flags=allow-oom",
        new="#!lua",
        test="tests/test_redis_kinds.py::test_settlement_is_the_same_on_every_kind",
    ),
    Mutation(
        promise="P27",
        what="an unprotected Redis is accepted",
        file="common/distaff/safety.py",
        old="    if not allow_unprotected:",
        new="    if False:",
        test="tests/test_redis_kinds.py::test_a_redis_that_others_reach_is_refused_without_a_password",
    ),
    Mutation(
        promise="P5",
        what="leases that ran out in an outage are swept at once",
        file="common/distaff/lua/sweep.lua",
        old="  if now < quiet then return back end\n",
        new="",
        test="tests/test_faults.py::test_leases_that_ran_out_in_an_outage_may_be_extended_before_they_are_swept",
    ),
    Mutation(
        promise="P27",
        what="a worker may delete the configuration of a run",
        file="common/distaff/acl.py",
        old='"{config}": "get",\n                "{state}": "exists hget hgetall hincrby hincrbyfloat",',
        new='"{config}": "get del",\n                "{state}": "exists hget hgetall hincrby hincrbyfloat",',
        test="tests/test_acl.py::test_a_role_cannot_do_what_is_the_others",
    ),
    Mutation(
        promise="P27",
        what="users of one prefix of runs reach all runs",
        file="common/distaff/acl.py",
        old='run = f"{PREFIX}:run:{self.runs}*"',
        new='run = f"{PREFIX}:run:*"',
        test="tests/test_acl.py::test_a_role_cannot_do_what_is_the_others",
    ),
    Mutation(
        promise="P27",
        what="a worker lacks a command that one of its scripts needs",
        file="common/distaff/acl.py",
        old='"{results}": "xadd expire",',
        new='"{results}": "xadd",',
        test="tests/test_acl.py::test_everything_that_can_become_of_an_item_is_granted_to_a_worker",
    ),
    Mutation(
        promise="P28",
        what="passwords stand in the ACL file as they are",
        file="common/distaff/acl.py",
        old='else "#" + hashlib.sha256(password.encode()).hexdigest()',
        new='else ">" + password',
        test="tests/test_acl.py::test_passwords_leave_as_hashes_and_never_as_arguments",
    ),
    Mutation(
        promise="P13",
        what="a retried dead letter keeps the attempts it has used",
        file="common/distaff/lua/retry_dead.lua",
        old="'distaff_attempts', 'distaff_lost',",
        new="'distaff_lost',",
        test="tests/test_dead.py::test_retried_letters_are_played_again_and_settled_once",
    ),
    Mutation(
        promise="P18",
        what="a worker's registration goes by its own clock",
        file="worker/distaff_worker/registration.py",
        old="return datetime.fromtimestamp(time.monotonic() + self._ahead_s, UTC)",
        new="return datetime.now(UTC)",
        test="tests/test_clock_skew.py::test_workers_hours_ahead_and_behind_settle_a_run_beside_one_on_time",
    ),
    Mutation(
        promise="P18",
        what="RQ's registries are cleaned up by the worker's clock",
        file="worker/distaff_worker/sweep.py",
        old="FailedJobRegistry(queue=queue).cleanup(server_s)",
        new="FailedJobRegistry(queue=queue).cleanup()",
        test="tests/test_clock_skew.py::test_a_wrong_clock_forgets_no_failed_job",
    ),
    Mutation(
        promise="P18",
        what="a lease that a wrong clock wiped is not written again",
        file="common/distaff/lua/beat.lua",
        old="redis.call('ZADD', KEYS[1], now",
        new="redis.call('ZADD', KEYS[1], 'XX', now",
        test="tests/test_faults.py::test_a_lease_that_was_wiped_from_the_registry_is_written_again",
    ),
    Mutation(
        promise="P18",
        what="an item is claimed although it is settled",
        file="common/distaff/lua/claim.lua",
        old="  if redis.call('GETBIT', prefix .. ':settled', seq) == 0 then return 'open' end",
        new="  if true then return 'open' end",
        test="tests/test_clock_skew.py::test_two_operators_with_wrong_clocks_look_all_the_time_and_nothing_is_lost_or_doubled",
    ),
    Mutation(
        promise="P26",
        what="the queue class of the documented command takes pickles",
        file="worker/distaff_worker/rq_schema.py",
        old='options["serializer"] = JSONSerializer',
        new="pass",
        test="tests/test_planted_pickle.py::test_the_documented_rq_info_executes_none",
    ),
    Mutation(
        promise="P4",
        what="a lease behind many that are not ours is not swept",
        file="common/distaff/lua/sweep.lua",
        old="      kept = kept + 1\n",
        new="",
        test="tests/test_faults.py::test_jobs_of_others_do_not_keep_a_lease_from_being_swept",
    ),
]
