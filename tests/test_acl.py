"""P27: each role runs to its end with its own least-privileged user, and cannot do what is the others'."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from rq.registry import FailedJobRegistry

from distaff import GroupConsumer, publish_policy_version, scripts
from distaff.acl import ROLES, Names
from distaff.cli.main import main
from distaff.clients import connect
from distaff.deletion import delete_run
from distaff.errors import RedisUnavailable
from distaff.keys import RunKeys
from distaff.runs import read_state
from distaff.types import RolloutItem
from distaff_worker.claim import Claimer
from distaff_worker.leases import Lease
from distaff_worker.letters import Letters
from distaff_worker.outcome import Outcome, Retry
from distaff_worker.rq_schema import JSONQueue
from tests.acl_support import PASSWORDS, as_user, guarded_redis
from tests.farm_support import says, tokenizer_dir
from tests.harness.oracle import check_settled
from tests.harness.processes import Child, start
from tests.harness.servers import KINDS, Kind
from tests.scripted_engine import ScriptedEngine
from tests.test_service import make_service, working
from tests.worker_support import POOL, ScriptedPlayer, check_oracle, emit_of, enqueue, open_run, until, wait_until

ROOT = Path(__file__).parent.parent
RUN = "run-1"
Capture = pytest.CaptureFixture[str]
OFFLINE = {"HF_HUB_OFFLINE": "1"}
QUEUE_CLASS = "distaff_worker.rq_schema.JSONQueue"


def variables() -> dict[str, str]:
    """What an operator exports before `distaff acl`."""
    return {"REDIS_PASSWORD": PASSWORDS["default"], **{role.variable: PASSWORDS[role.user] for role in ROLES}}


def printed(capsys: Capture, monkeypatch: pytest.MonkeyPatch, *argv: str, **environ: str) -> tuple[str, str]:
    """stdout and stderr of `distaff acl`."""
    for name in variables():
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["acl", *argv]) == 0
    return capsys.readouterr()


def run_file(folder: Path, engine_url: str) -> Path:
    """Six items, of which 0 and 3 fail."""
    file = folder / "run.toml"
    file.write_text(
        f"""
        [run]
        name = "{RUN}"
        [environment]
        id = "tests.marker_env"
        args = {{rows = 6, turns = 1, fault = "raise"}}
        [engine]
        kind = "vllm"
        base_urls = ["{engine_url}"]
        [tokenizer]
        name = "{tokenizer_dir()}"
        [rollouts]
        group_size = 2
        max_attempts = 1
        rollout_retries = 0
        [producer]
        window = 4
        """
    )
    return file


def distaff(stack: ExitStack, url: str, user: str, *argv: str) -> Child:
    """A command in a process of its own, as `user`."""
    environ = {**OFFLINE, "DISTAFF_REDIS_URL": as_user(url, user)}
    return stack.enter_context(start([sys.executable, "-m", "distaff", *argv], env=environ))


def rq(url: str, *argv: str) -> str:
    """`rq` as the operator."""
    environ = {"RQ_QUEUE_CLASS": QUEUE_CLASS, "RQ_REDIS_URL": as_user(url, "operator")}
    with start([sys.executable, "-m", "rq.cli", *argv], env=environ) as child:
        assert child.wait(60) == 0, child.log
        return child.log


def shown(url: str, user: str, capsys: Capture, *argv: str) -> str:
    """What a command of ours prints, run in this process."""
    capsys.readouterr()
    assert main([*argv, "--redis-url", as_user(url, user)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_farm_runs_under_its_own_users(kind: Kind, tmp_path: Path, capsys: Capture) -> None:
    """Producer, worker, archiver, trainer, monitor and operator, each with its user: all is settled, and nothing was ever refused."""
    with (
        ExitStack() as stack,
        ScriptedEngine(script=lambda ask: says("number 1")) as engine,
        guarded_redis(tmp_path / "redis", kind=kind) as (url, admin),
    ):
        file = str(run_file(tmp_path, engine.url))
        worker = distaff(stack, url, "worker", "work", "--worker.lease-s", "5")
        archiver = distaff(stack, url, "archiver", "archive", file, "--directory", str(tmp_path / "archive"))
        script = [sys.executable, str(ROOT / "examples/trainer.py"), as_user(url, "trainer"), RUN]
        trainer = stack.enter_context(start(script))
        wait_until(lambda: "trainer" in _groups(admin) and "archive" in _groups(admin), seconds=90)
        producer = distaff(stack, url, "producer", "produce", file)
        assert producer.wait(120) == 0, producer.log
        assert trainer.wait(60) == 0, trainer.log
        assert archiver.wait(60) == 0, archiver.log
        status = json.loads(shown(url, "monitor", capsys, "status", "--json"))
        assert [run["settled"] for run in status["runs"]] == [6]
        assert status["runs"][0]["policy_version"] == 1
        assert status["workers"][0]["slots"] == 64
        assert "queue default 0" in rq(url, "info", "-r")
        rq(url, "suspend")
        assert json.loads(shown(url, "operator", capsys, "status", "--json"))["suspended"]
        assert "2 back on the queue" in shown(url, "operator", capsys, "dead", "retry", RUN, "--all")
        assert "queue default 2" in rq(url, "info", "-r")
        rq(url, "resume")
        wait_until(lambda: _dead(admin) == 2, seconds=60)
        assert "2 dead letters: scoring_error 2" in shown(url, "operator", capsys, "dead", "list", RUN)
        rq(url, "requeue", "--queue", "default", "-S", "json", "--all")
        wait_until(lambda: _retaken(admin), seconds=60)
        worker.terminate()
        assert worker.wait(60) == 0, worker.log
        archived = [json.loads(line) for path in (tmp_path / "archive").glob("*.jsonl") for line in path.open()]
        check_settled(admin, RUN, emitted=[int(group["seq"]) for group in archived])
        jsonl = str(tmp_path / "letters.jsonl")
        assert "2 dead letters dropped" in shown(url, "operator", capsys, "dead", "drop", RUN, "--all", "--to", jsonl)
        assert "deleted run" in shown(url, "operator", capsys, "runs", "delete", RUN)
        assert [key for key in admin.keys("distaff:*") if RUN.encode() in key] == []
        refused = {(row["username"], row["object"]) for row in admin.acl_log()}
        assert {(user, what) for user, what in refused if what != "client|setinfo"} == set()


def _groups(admin: redis.Redis) -> set[str]:
    try:
        return {group["name"].decode() for group in admin.xinfo_groups(RunKeys(RUN).groups)}
    except redis.exceptions.ResponseError:
        return set()


def _dead(admin: redis.Redis) -> int:
    state = read_state(admin, RUN)
    return state.dead if state is not None and state.ended else 0


def _retaken(admin: redis.Redis) -> bool:
    """Both jobs that `rq requeue` put back have failed again."""
    jobs: Any = [admin.hget(f"rq:job:{RUN}-{seq:09d}", "status") for seq in (0, 3)]
    return _dead(admin) == 2 and admin.zcard("rq:failed:default") == 2 and jobs == [b"failed", b"failed"]


SCRIPTS = {
    "producer": ["open_run", "admit", "close_run", "restore"],
    "worker": ["claim", "beat", "emit", "bury", "release", "sweep", "settle_canceled"],
    "archiver": ["free", "park"],
    "trainer": ["free", "park", "publish_policy"],
    "operator": ["purge_queue", "retry_dead", "forget_dead"],
}


def test_every_script_is_somebodys_and_its_commands_are_granted() -> None:
    """A command that is added to a script is missed here at once, not when a farm with ACLs comes to it."""
    assert {name for names in SCRIPTS.values() for name in names} == {
        path.stem for path in (ROOT / "common/distaff/lua").glob("*.lua")
    }
    for role in ROLES:
        granted = {word for grants in role.grants for commands in grants.values() for word in commands.split()}
        granted = {word.partition("|")[0] for word in granted | set(role.commands.split())}
        for name in SCRIPTS.get(role.name, []):
            used = re.findall(r"redis\.p?call\(\s*'([A-Z]+)'", scripts.load(name))
            missing = {word.lower() for word in used} - granted
            assert not missing, f"{role.name} may not do what {name}.lua does: {sorted(missing)}"


@pytest.mark.parametrize("kind", KINDS)
async def test_everything_that_can_become_of_an_item_is_granted_to_a_worker(kind: Kind, tmp_path: Path) -> None:
    """Emitted, retried, given up, handed back, swept, canceled, requeued, not ours: the server refuses nothing of it, in no script."""
    tries = Counter[int]()

    async def play(lease: Lease, item: RolloutItem) -> Outcome:
        tries[item.seq] += 1
        if item.seq == 1 and tries[1] == 1:
            return Retry(kind="timeout", boundary="rollout", message="once")
        if item.seq == 2:
            return Letters("w1").bury(lease, item, kind="timeout", boundary="rollout", message="always")
        if item.seq == 3 and tries[3] == 1:
            service._executions.interrupt(lease.execution_id, "hand_back")
            await asyncio.sleep(60)
        return emit_of(item)

    with guarded_redis(tmp_path, kind=kind) as (url, admin):
        open_run(admin, RUN)
        names = enqueue(admin, RUN, 7)
        admin.lrem("rq:queue:default", 0, names[5])
        admin.hset(f"rq:job:{names[5]}", "status", "canceled")
        admin.zadd("rq:canceled:default", {names[5]: 1})
        admin.rpush("rq:queue:default", "somebody-else")
        admin.hset("rq:job:somebody-else", mapping={"status": "queued", "data": "x"})
        with connect(as_user(url, "worker")) as lost:
            Claimer(lost, pool=POOL, worker="dead", worker_key="rq:worker:dead", lease_s=0.1).claim(1)
        service = make_service(as_user(url, "worker"), ScriptedPlayer(play))
        async with working(service):
            await until(lambda: admin.bitcount(RunKeys(RUN).settled) == 7, seconds=20)
            await asyncio.to_thread(service._sweeper.tidy)
            failed = FailedJobRegistry(queue=JSONQueue(POOL, connection=admin))
            failed.requeue(names[2])
            await until(lambda: tries[2] == 2 and admin.bitcount(RunKeys(RUN).settled) == 7)
        check_oracle(admin, RUN)
        state = read_state(admin, RUN)
        assert state is not None
        assert (state.emitted, state.dead, state.retried, state.handed_back, state.lost) == (5, 2, 1, 1, 1)
        refused = {(row["username"], row["object"]) for row in admin.acl_log()}
        assert {(user, what) for user, what in refused if what != "client|setinfo"} == set()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, redis.Redis]]:
    """A server whose users may use the pool "p" and runs that begin with "t1-"."""
    with guarded_redis(tmp_path_factory.mktemp("guarded"), names=Names(pool="p", runs="t1-")) as server:
        yield server


def key(name: str, run: str = "t1-x") -> str:
    return f"distaff:run:{run}:{name}"


DANGEROUS = [
    "FLUSHALL",
    "FLUSHDB",
    "CONFIG GET *",
    "CONFIG SET save x",
    "KEYS *",
    "EVAL x 0",
    "SHUTDOWN",
    "DEBUG SLEEP 1",
]
DANGEROUS += [
    "ACL LIST",
    "ACL SETUSER x",
    "CLIENT KILL 1",
    "CLIENT LIST",
    "MONITOR",
    "SAVE",
    "SCRIPT FLUSH",
    "REPLICAOF a 1",
]
DANGEROUS += ["MODULE LIST", "SWAPDB 0 1", "MIGRATE h 1 k 0 1", "RESTORE k 0 x", "SORT k", "COPY rq:queues rq:x"]
OTHERS = {
    "producer": [
        f"XADD {key('groups')} * a b", f"XREADGROUP GROUP g c STREAMS {key('groups')} >", f"UNLINK {key('groups')}",
        f"DEL {key('groups')}", f"HSET {key('policy')} version 1", f"HSET {key('dead')} 0 x", "LPOP rq:queue:p",
        "LPUSH rq:queue:other x", f"SETBIT {key('settled')} 0 1", "SET rq:suspended 1", "SUBSCRIBE c",
        f"GET {key('config', 't2-x')}", "HGETALL rq:job:t2-x-000000000", "SREM distaff:runs t1-x", "SCAN 0",
    ],
    "worker": [
        f"UNLINK {key('state')}", f"DEL {key('config')}", f"DEL {key('groups')}", f"DEL {key('state')}", "SREM distaff:runs t1-x",
        f"SET {key('config')} x", f"GET {key('config', 't2-x')}", f"XREADGROUP GROUP g c STREAMS {key('groups')} >",
        f"XADD {key('groups', 't2-x')} * a b", f"XTRIM {key('groups')} MAXLEN 0", f"HSET {key('policy')} version 1",
        f"HSET {key('state')} status closed", "SADD distaff:runs t1-y", "SET rq:suspended 1", "DEL rq:suspended",
        "PUBLISH rq:pubsub:w x", "BLMOVE rq:queue:other rq:queue:other LEFT LEFT 1", "LPOP rq:queue:other", "SCAN 0",
        "DEL rq:queue:p", "SUBSCRIBE other:channel", "HGETALL rq:job:t2-x-000000000",
    ],
    "archiver": [
        f"HSET {key('policy')} version 1", f"XADD {key('groups')} * a b", "RPUSH rq:queue:p x", f"HSET {key('state')} a b",
        f"DEL {key('groups')}", f"SET {key('config')} x", f"HDEL {key('dead')} 0", f"XREADGROUP GROUP g c STREAMS {key('groups', 't2-x')} >",
        "LRANGE rq:queue:p 0 -1", "SCAN 0", f"XADD {key('groups:parked:g', 't2-x')} * a b",
    ],
    "trainer": [
        "RPUSH rq:queue:p x", "LPUSH rq:queue:p x", "HSET rq:job:t1-x-000000000 a b", "SADD distaff:runs t1-x",
        f"XADD {key('groups')} * a b", f"DEL {key('groups')}", f"GET {key('config')}", f"SET {key('config')} x", f"HSET {key('state')} a b",
        f"HSET {key('policy', 't2-x')} version 1", f"XREADGROUP GROUP g c STREAMS {key('groups', 't2-x')} >", "SCAN 0", "INFO",
    ],
    "operator": [
        f"XADD {key('groups')} * a b", f"SET {key('config')} x", f"HSET {key('policy')} version 1", f"HSET {key('dead')} 0 x",
        f"XREADGROUP GROUP g c STREAMS {key('groups')} >", "RPUSH rq:queue:other x", f"UNLINK {key('state', 't2-x')}",
        "HSET rq:job:t2-x-000000000 a b", "HSET rq:worker:w a b",
    ],
    "monitor": [
        f"HSET {key('state')} a b", f"DEL {key('state')}", f"UNLINK {key('groups')}", "RPUSH rq:queue:p x", "SET rq:suspended 1",
        "PUBLISH rq:pubsub:w x", f"XADD {key('groups')} * a b", "EVALSHA x 0", "SCRIPT LOAD x", "SADD distaff:runs x",
        f"EXPIRE {key('state')} 1", f"HGETALL {key('state', 't2-x')}", f"HDEL {key('dead')} 0", "SCAN 0", "MULTI",
    ],
}  # fmt: skip


@pytest.mark.parametrize("role", [role.name for role in ROLES])
def test_a_role_cannot_do_what_is_the_others(role: str, guarded: tuple[str, redis.Redis]) -> None:
    """Nor touch another team's runs or pool, nor anything that is an administrator's."""
    _, admin = guarded
    for command in (*OTHERS[role], *DANGEROUS):
        answer: Any = admin.acl_dryrun(f"distaff-{role}", *command.split())
        assert answer != b"OK", f"{role} may {command}"
        assert b"permission" in answer, (command, answer)


def test_a_monitor_may_run_nothing_that_writes(guarded: tuple[str, redis.Redis]) -> None:
    """By the server's own account of its commands."""
    _, admin = guarded
    monitor = next(role for role in ROLES if role.name == "monitor")
    names = {name for grants in monitor.grants for commands in grants.values() for name in commands.split()}
    known: Any = admin.command()
    assert len(names) > 8
    assert [name for name in names if "write" in known[name.partition("|")[0]]["flags"]] == []


def test_no_role_gets_a_whole_category(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are listed one by one; keys and channels never by a bare star."""
    lines = printed(capsys, monkeypatch)[0].splitlines()
    assert len(lines) == 1 + len(ROLES)
    for line in lines:
        assert "+@" not in line
        assert "~*" not in line
        assert "&*" not in line


def test_the_shipped_file_is_what_the_command_prints(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """deploy/acl/users.acl, without passwords: nobody can log in until they are added."""
    out, err = printed(capsys, monkeypatch)
    assert (ROOT / "deploy/acl/users.acl").read_text() == out
    assert err.count("is not set") == 1 + len(ROLES)
    assert "#" not in out


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_file_loads_and_lets_nobody_in(kind: Kind, tmp_path: Path) -> None:
    """A server that cannot read its ACL file does not start."""
    text = (ROOT / "deploy/acl/users.acl").read_text()
    with guarded_redis(tmp_path, kind=kind, text=text) as (url, _):
        for user in PASSWORDS:
            with connect(as_user(url, user)) as client, pytest.raises(redis.exceptions.AuthenticationError):
                client.ping()


def test_passwords_leave_as_hashes_and_never_as_arguments(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain or hashed in the environment: the same file, and no word of the password in it."""
    plain = printed(capsys, monkeypatch, **variables())
    hashes = {name: f"#{hashlib.sha256(value.encode()).hexdigest()}" for name, value in variables().items()}
    hashed = printed(capsys, monkeypatch, **hashes)
    assert plain == hashed
    assert "pw-of" not in "".join(plain)
    assert plain[0].splitlines()[0].startswith("user default on #")


@pytest.mark.parametrize(
    ("argv", "environ", "said"),
    [
        (["--runs", "a*"], {}, "--runs 'a*': use 1 to 64 letters"),
        (["--pool", "a b"], {}, "run.pool: use 1 to 64 letters"),
        (["--password", "x"], {}, "unknown flag --password"),
        ([], {"WORKER_PASSWORD": "#12"}, "WORKER_PASSWORD begins with '#' and is no hash"),
    ],
)
def test_what_is_wrong_is_exit_code_2(
    argv: list[str], environ: dict[str, str], said: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing that could be taken for a file is printed."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["acl", *argv]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


@pytest.mark.skipif(shutil.which("docker") is None, reason="needs docker compose, no container engine")
def test_each_service_of_the_compose_project_has_its_own_user(tmp_path: Path) -> None:
    """deploy/acl/compose.yml laid over docker-compose.yml, as docker compose itself reads them."""
    (tmp_path / "users.acl").write_text("user default off\n")
    passwords = {
        f"{name}_PASSWORD": f"pw-{name.lower()}" for name in ("REDIS", "PRODUCER", "WORKER", "ARCHIVER", "OPERATOR")
    }
    environ = {**os.environ, **passwords, "ACL_FILE": str(tmp_path / "users.acl")}
    command = "docker compose -f docker-compose.yml -f deploy/acl/compose.yml --profile operator config --format json"
    done = subprocess.run(
        command.split(), cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    project = json.loads(done.stdout)
    services = project["services"]
    for name in ("producer", "worker", "archiver", "operator"):
        url = f"redis://distaff-{name}:pw-{name}@redis:6379/0"
        environment = services[name]["environment"]
        assert environment["DISTAFF_REDIS_URL"] == url
        assert [value for value in environment.values() if "redis://" in value and value != url] == []
    assert project["configs"]["redis"]["content"].split() == ["aclfile", "/etc/distaff-users.acl"]
    assert {"source": "users", "target": "/etc/distaff-users.acl"} in services["redis"]["configs"]


def test_a_refused_command_says_who_lacks_what_and_the_mend(
    guarded: tuple[str, redis.Redis], tmp_path: Path, capsys: Capture
) -> None:
    """One message, no traceback, no password, the same for a command inside a script; exit code 2, or 1 when work had begun."""
    url, admin = guarded
    admin.hset(key("state"), mapping={"status": "closed", "admitted": 1, "dead": 1, "opened": 1})
    admin.set(key("config"), '{"run": {"pool": "p"}}')
    admin.hset(key("dead"), "0", '{"kind": "lost"}')
    admin.acl_setuser("distaff-half", enabled=True, passwords=["+pw-of-half"], keys=["*"], commands=["+@all", "-hdel"])
    archive = ["archive", "--run", "t1-x", "--directory", str(tmp_path)]
    cases = [
        ("trainer", 2, ["status"]),
        ("monitor", 2, ["runs", "delete", "t1-x"]),
        ("worker", 2, ["dead", "list", "t2-x"]),
        ("half", 2, ["dead", "drop", "t1-x", "0"]),
        ("operator", 1, archive),
    ]
    for user, code, argv in cases:
        capsys.readouterr()
        login = as_user(url, user) if user != "half" else url.replace("unix://", "unix://distaff-half:pw-of-half@")
        assert main([*argv, "--redis-url", login]) == code, capsys.readouterr().err
        text = capsys.readouterr().err
        assert f"does not let user 'distaff-{user}' do this (" in text
        assert re.search("permission|can't run this command", text)
        assert "docs/acl.md" in text
        assert "Traceback" not in text
        assert "pw-of" not in text


def test_a_trainer_without_the_right_is_told(guarded: tuple[str, redis.Redis]) -> None:
    """Consumer and policy alike: an error of ours at once, not a wait for better times."""
    url, _ = guarded
    tries: list[Callable[[redis.Redis], Any]] = [
        lambda client: next(GroupConsumer("t2-x", client)),
        lambda client: publish_policy_version(client, "t2-x", 1),
        lambda client: publish_policy_version(client, "t1-x", 1),
    ]
    with connect(as_user(url, "archiver")) as client:
        for attempt in tries:
            with pytest.raises(RedisUnavailable, match=r"docs/acl\.md"):
                attempt(client)


def test_deleting_a_run_is_the_operators(guarded: tuple[str, redis.Redis]) -> None:
    """Whoever else tries removes nothing."""
    url, admin = guarded
    admin.hset(key("state"), "status", "open")
    for role in ("producer", "worker", "archiver", "trainer", "monitor"):
        with connect(as_user(url, role)) as client, pytest.raises(redis.exceptions.NoPermissionError):
            delete_run(client, "t1-x", force=True)
    assert admin.exists(key("state"))
    with connect(as_user(url, "operator")) as client:
        assert delete_run(client, "t1-x")
    assert not admin.exists(key("state"))


def test_a_server_that_may_not_be_asked_about_itself_is_used_with_one_warning(
    guarded: tuple[str, redis.Redis],
) -> None:
    """A user without INFO: what could not be checked is said once, in the log of a real process, and the work goes on."""
    url, admin = guarded
    admin.acl_setuser("noinfo", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-info"])
    argv = [
        sys.executable,
        "-m",
        "distaff",
        "work",
        "--worker.burst",
        "--redis-url",
        url.replace("unix://", "unix://noinfo:pw@"),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.count("redis.check_skipped") == 1
    assert "+info" in done.stderr
