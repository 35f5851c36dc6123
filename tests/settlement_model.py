"""What the delivery of items must do, said without Redis: the model that the settlement machine holds the real scripts against.

Invariant: a method changes what the step it is named after should change, and returns what that step should answer. Sets instead of
bitmaps and counters, so that a disagreement is an arithmetic one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from distaff.keys import parse_job_id

WINDOW = 5


@dataclass(slots=True)
class Job:
    """An RQ job as far as it matters."""

    status: str = "queued"
    holder: str = ""
    """The execution that owns it."""
    settled_by: str = ""
    attempts: int = 0
    lost: int = 0


@dataclass(slots=True)
class Readers:
    """One consumer group."""

    delivered: dict[str, str] = field(default_factory=dict)
    """Pending entries, and the member that has each."""
    last: int = 0
    """How many entries of the run's history it was given or passed."""


@dataclass(slots=True)
class Run:
    life: str
    closed: bool = False
    admitted: int = 0
    emitted: dict[int, str] = field(default_factory=dict)
    """Item -> stream entry."""
    letters: dict[int, str] = field(default_factory=dict)
    """Item -> kind of its dead letter."""
    forgotten: dict[int, str] = field(default_factory=dict)
    """As letters, of those that were dropped: settled and counted all the same."""
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("retried", "lost", "handed_back"), 0))
    history: list[str] = field(default_factory=list)
    """Every entry ever appended."""
    stream: list[str] = field(default_factory=list)
    revived: int = 0
    """Dead letters that were played again: what an operator may put on top of the window."""

    @property
    def dead(self) -> int:
        return len(self.letters) + len(self.forgotten)

    def settled(self, seq: int) -> bool:
        return seq in self.emitted or seq in self.letters or seq in self.forgotten

    @property
    def standing(self) -> int:
        """What the window counts."""
        return self.admitted - len(self.emitted) - self.dead + len(self.stream)


class Model:
    """One pool."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.groups: dict[str, dict[str, Readers]] = {}
        """Consumer groups of each run; they may be there before it."""
        self.policies: dict[str, int] = {}
        self.jobs: dict[str, Job] = {}
        self.queue: list[str] = []
        self.wip: dict[str, bool] = {}
        """Leases in the registry, and whether each has run out."""
        self.keys: set[str] = set()
        self.order: dict[str, int] = {}
        """Lease -> which it was: execution ids differ between two runs of the same steps."""
        """Leases whose execution key is there."""
        self.canceled: set[str] = set()
        self.failed: set[str] = set()
        self.suspended = False

    # -- the producer

    def open(self, run: str, life: str) -> None:
        self.runs[run] = Run(life)

    def admit(self, run: str, ids: list[str], *, expected: int, front: bool) -> str:
        known = self.runs.get(run)
        if known is None:
            return "missing"
        if known.closed:
            return "closed"
        if known.admitted != expected:
            return "moved"
        count = min(len(ids), WINDOW - known.standing)
        if count < 1:
            return "full"
        known.admitted += count
        for name in ids[:count]:
            self.jobs[name] = Job()
            self.push(name, front=front)
        return "admitted"

    def close(self, run: str, expected: int) -> str:
        known = self.runs.get(run)
        if known is None:
            return "missing"
        if not known.closed and known.admitted != expected:
            return "moved"
        known.closed = True
        return "closed"

    def astray(self, run: str) -> list[str]:
        """Items that nobody would ever play or settle without the producer's help."""
        known = self.runs[run]
        ids = (self.name(run, seq) for seq in range(known.admitted) if not known.settled(seq))
        return [name for name in ids if not self.cared_for(name)]

    def cared_for(self, name: str) -> bool:
        job = self.jobs.get(name)
        if job is None:
            return False
        lease = f"{name}:{job.holder}"
        queued = job.status == "queued" and name in self.queue
        leased = job.status == "started" and (lease in self.wip or lease in self.keys)
        return queued or leased or job.status == "canceled"

    def restore(self, run: str) -> int:
        ids = self.astray(run)
        unsettled = (self.name(run, seq) for seq in range(self.runs[run].admitted) if not self.runs[run].settled(seq))
        self.canceled |= {name for name in unsettled if name in self.jobs and self.jobs[name].status == "canceled"}
        for name in ids:
            job = self.jobs.setdefault(name, Job())
            job.status, job.holder = "queued", ""
            self.push(name)
        return len(ids)

    def forget_run(self, run: str) -> None:
        """The run's own keys are gone."""
        for values in (self.runs, self.groups, self.policies):
            values.pop(run, None)

    def delete_run(self, run: str) -> None:
        self.forget_run(run)
        self.queue = [name for name in self.queue if not self.is_of(name, run)]
        self.wip = {lease: out for lease, out in self.wip.items() if not self.is_of(lease.partition(":")[0], run)}
        self.keys = {lease for lease in self.keys if not self.is_of(lease.partition(":")[0], run)}
        self.jobs = {name: job for name, job in self.jobs.items() if not self.is_of(name, run)}
        self.canceled = {name for name in self.canceled if not self.is_of(name, run)}
        self.failed = {name for name in self.failed if not self.is_of(name, run)}

    # -- a worker

    def claim(self, count: int, *, suspects: int, refused: Collection[str]) -> list[str]:
        claimed: list[str] = []
        for name in list(self.queue):
            if len(claimed) == count:
                break
            self.queue.pop(0)
            job = self.jobs.get(name)
            if job is None or job.status != "queued":
                continue
            suspect = job.lost >= 2
            run, seq = parse_job_id(name) or ("", 0)
            known = self.runs.get(run)
            if (suspect and suspects) or (known and f"{run} {known.life}" in refused):
                self.queue.append(name)
            elif run and (known is None or seq >= known.admitted):
                del self.jobs[name]
            elif known and (seq in known.emitted or seq in known.forgotten):
                job.status = "finished"
            else:
                if known and known.letters.pop(seq, None):
                    known.revived += 1
                    job.attempts = job.lost = 0
                    job.settled_by = ""
                suspects += suspect
                job.status = "started"
                claimed.append(name)
        return claimed

    def lease(self, name: str, execution: str) -> None:
        self.jobs[name].holder = execution
        self.wip[f"{name}:{execution}"] = False
        self.order.setdefault(f"{name}:{execution}", len(self.order))
        self.keys.add(f"{name}:{execution}")

    def owns(self, name: str, execution: str) -> bool:
        job = self.jobs.get(name)
        return job is not None and job.status == "started" and job.holder == execution

    def beat(self, name: str, execution: str) -> bool:
        if self.owns(name, execution):
            self.lease(name, execution)
            return True
        self.end(name, execution)
        return False

    def settle(self, name: str, execution: str) -> str:
        """What an emit or a bury of this execution answers; "" when it is to be carried out."""
        job, (run, seq) = self.jobs.get(name), parse_job_id(name) or ("", 0)
        known = self.runs.get(run)
        if job is None:
            return "gone"
        if job.settled_by == execution:
            return "already"
        if known and known.settled(seq):
            return "settled"
        if not self.owns(name, execution):
            return "lost"
        return "gone" if run and (known is None or seq >= known.admitted) else ""

    def emit(self, name: str, execution: str) -> str:
        verdict = self.settle(name, execution)
        if verdict == "gone":
            self.jobs.pop(name, None)
        if not verdict:
            self._conclude(name, execution, "finished")
        if verdict != "already":
            self.end(name, execution)
        return verdict or "emitted"

    def appended(self, run: str, seq: int, entry: str) -> None:
        """The stream has an entry of the item."""
        known = self.runs[run]
        assert not known.settled(seq)
        known.emitted[seq] = entry
        known.history.append(entry)
        known.stream.append(entry)

    def bury(self, name: str, execution: str, *, kind: str, status: str) -> str:
        verdict = self.settle(name, execution)
        if verdict == "gone":
            self.jobs.pop(name, None)
        if not verdict:
            self._conclude(name, execution, status)
            self.failed.add(name)
            run, seq = parse_job_id(name) or ("", 0)
            if run in self.runs:
                self.runs[run].letters[seq] = kind
        if verdict != "already":
            self.end(name, execution)
        return verdict or "buried"

    def release(self, name: str, execution: str, reason: str) -> str:
        if not self.owns(name, execution):
            self.end(name, execution)
            return "lost"
        job = self.jobs[name]
        job.status, job.holder = "queued", ""
        job.attempts += reason == "retried"
        self.push(name, front=reason == "handed_back")
        self._count(name, reason)
        self.end(name, execution)
        return "released"

    def sweep(self) -> list[str]:
        back = []
        for lease in sorted(lease for lease, out in self.wip.items() if out):
            name, _, execution = lease.partition(":")
            if self.owns(name, execution):
                job = self.jobs[name]
                job.status, job.holder = "queued", ""
                job.lost += 1
                self.push(name, front=True)
                self._count(name, "lost")
                back.append(name)
            del self.wip[lease]
        return back

    def settle_canceled(self) -> list[str]:
        """Dead letters written."""
        written = []
        for name in sorted(self.canceled):
            run, seq = parse_job_id(name) or ("", 0)
            if not run:
                continue
            self.canceled.discard(name)
            job, known = self.jobs.get(name), self.runs.get(run)
            if job is None or job.status != "canceled":
                continue
            self.end(name, job.holder)
            if known is None or seq >= known.admitted:
                del self.jobs[name]
            elif seq in known.emitted or seq in known.forgotten:
                job.status = "finished"
            else:
                if seq not in known.letters:
                    known.letters[seq] = "stopped"
                    written.append(name)
                job.status, job.holder = "stopped", ""
                self.failed.add(name)
        return written

    # -- consumers

    def join(self, run: str, group: str) -> Readers:
        return self.groups.setdefault(run, {}).setdefault(group, Readers())

    def read(self, run: str, group: str, member: str, *, holds: Collection[str]) -> str | None:
        """The entry that the member is given: first what it had before it was started anew."""
        known = self.runs[run]
        readers = self.join(run, group)
        mine = [entry for entry in known.history if readers.delivered.get(entry) == member and entry not in holds]
        if mine:
            return mine[0]
        fresh = [entry for entry in known.history[readers.last :] if entry in known.stream]
        if not fresh:
            return None
        readers.last = known.history.index(fresh[0]) + 1
        readers.delivered[fresh[0]] = member
        return fresh[0]

    def acknowledge(self, run: str, group: str, entry: str) -> int:
        groups = self.groups.get(run, {})
        pending = group in groups and groups[group].delivered.pop(entry, None) is not None
        known = self.runs.get(run)
        if known and groups:
            needed = {
                name
                for place, name in enumerate(known.history)
                for other in groups.values()
                if place >= other.last or name in other.delivered
            }
            known.stream = [name for name in known.stream if name in needed]
        return int(pending)

    # -- others

    def retry(self, run: str, seq: int) -> str:
        """`distaff dead retry`."""
        known, name = self.runs[run], self.name(run, seq)
        if not known.letters.pop(seq, ""):
            return "none" if known.settled(seq) else "underway"
        self.jobs[name] = Job()
        self.failed.discard(name)
        self.canceled.discard(name)
        known.revived += 1
        if name not in self.queue:
            self.push(name)
        return "queued"

    def drop(self, run: str, seq: int) -> None:
        """`distaff dead drop`."""
        known = self.runs[run]
        known.forgotten[seq] = known.letters.pop(seq)

    def foreign(self, name: str) -> None:
        """Somebody enqueues a job of his own."""
        self.jobs.setdefault(name, Job()).status = "queued"
        self.push(name)

    # -- parts

    @staticmethod
    def is_of(name: str, run: str) -> bool:
        return (parse_job_id(name) or ("",))[0] == run

    @staticmethod
    def name(run: str, seq: int) -> str:
        return f"{run}-{seq:09d}"

    def push(self, name: str, *, front: bool = False) -> None:
        self.queue.insert(0 if front else len(self.queue), name)

    def end(self, name: str, execution: str) -> None:
        self.wip.pop(f"{name}:{execution}", None)
        self.keys.discard(f"{name}:{execution}")

    def _conclude(self, name: str, execution: str, status: str) -> None:
        job = self.jobs[name]
        job.status, job.settled_by = status, execution

    def _count(self, name: str, counter: str) -> None:
        run, _ = parse_job_id(name) or ("", 0)
        if run in self.runs:
            self.runs[run].counters[counter] += 1
