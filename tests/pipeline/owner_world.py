"""The outside world of one owner, as small as it can be: two lookups, two prefill and two decode engines, FENCE.

A world is a value: `clone` it, take a step, compare. A step delivers the oldest message or, when none is under
way, lets time pass to the next event. Every deviation from that is a fault: lose, double or overtake a message, let
time pass while messages are under way, kill a worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.errors import ErrorCode
from pipeline.events import (
    Accepted,
    FinishReason,
    Found,
    KVTransferred,
    Outcome,
    Plan,
    PrefillNoted,
    StageFailed,
)
from pipeline.owner import (
    TABLE,
    AckIntake,
    Arm,
    AskFence,
    AskFind,
    Cancel,
    Delivered,
    Disarm,
    Dispatch,
    Encode,
    Encoded,
    EndStream,
    Fenced,
    Finished,
    Forget,
    HolderLost,
    NotReady,
    Owner,
    OwnerLimits,
    Progress,
    Restart,
    Started,
    State,
    TimedOut,
    Timer,
)

RID = "00112233445566778899aabbccddeeff"
LIMITS = OwnerLimits(
    accept_timeout_s=0.025,
    accept_tries=3,
    retry_pause_s=0.05,
    find_timeout_s=0.05,
    stage_timeout_s=0.5,
    progress_s=5.0,
    max_attempts=8,
    end_grace_s=5.0,
)
TIMEOUT_S = 45.0  # above the lease
LEASE_S = 30.0
NOTICED_S = 1.0  # 0.5 s of silence and an unanswered ping
STEP_S = 0.01  # an engine's work
PLAN = Plan(700, 512, 512, 384, 77)
LOOKUPS, PREFILLS, DECODES = ("lookup-1", "lookup-2"), ("prefill-1", "prefill-2"), ("decode-1", "decode-2")
IN_HAND = (Outcome.ACCEPTED, Outcome.QUEUED, Outcome.DUPLICATE)
WAYS_OUT = {
    State.FINDING: Timer.FIND,
    State.OFFERED: Timer.ACCEPT,
    State.WAITING: Timer.RETRY,
    State.LOOKUP: Timer.STAGE,
}
RELIABLE = "reliable"  # what the owner's own process does: neither lost nor doubled


@dataclass(slots=True)
class Worker:
    """An engine or lookup: attempts in hand and how far each is."""

    epoch: int
    died_at: float = -1.0
    buried: int = -1
    jobs: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class World:
    """Everything there is. `seen` collects the table's rows that were used."""

    machine: Owner
    now: float = 0.0
    timers: dict[Timer, float] = field(default_factory=dict)
    net: list[tuple[Any, ...]] = field(default_factory=list)  # (to, kind, …), oldest first
    events: list[tuple[Any, ...]] = field(default_factory=list)  # (at, serial, worker, what, …)
    workers: dict[str, Worker] = field(default_factory=dict)
    serial: int = 0
    fence: int = 41
    asked: set[str] = field(default_factory=set)  # work of the owner's own process that is under way
    end: EndStream | None = None
    closed: bool = False
    ready_after: int = 0  # so many times the codec is not ready
    living_owner: bool = False
    busy: int = 0  # so many offers to prefill find no room
    refusing: frozenset[str] = frozenset()
    flawed: bool = False  # engines fail for good instead of for a while
    suffered: tuple[str, ...] = ()
    seen: set[tuple[Any, ...]] = field(default_factory=set)

    @classmethod
    def begin(cls, num_delivered: int = 1, **options: Any) -> World:
        names = (*LOOKUPS, *PREFILLS, *DECODES)
        world = cls(Owner(RID, LIMITS, TIMEOUT_S), workers={w: Worker(100 + i) for i, w in enumerate(names)}, **options)
        world.signal(Started(num_delivered))
        return world

    def clone(self) -> World:
        copy = replace(self, timers=dict(self.timers), net=list(self.net), events=list(self.events))
        copy.asked = set(self.asked)
        copy.machine = replace(self.machine, holders={r: replace(h) for r, h in self.machine.holders.items()})
        copy.workers = {n: Worker(w.epoch, w.died_at, w.buried, dict(w.jobs)) for n, w in self.workers.items()}
        return copy

    def key(self) -> tuple[Any, ...]:
        m = self.machine
        return (
            (m.state, m.attempt, m.tries, m.pauses, m.deaths, m.encoded, tuple(sorted(m.waits_for))),
            tuple((r, h.worker, h.epoch) for r, h in sorted(m.holders.items())),
            tuple((t, round(at - self.now, 6)) for t, at in sorted(self.timers.items())),
            tuple(self.net),
            tuple((round(e[0] - self.now, 6), *e[2:]) for e in sorted(self.events)),
            tuple((w.died_at >= 0, w.buried, tuple(sorted(w.jobs.items()))) for w in self.workers.values()),
            (tuple(sorted(self.asked)), self.fence, self.busy, self.ready_after, round(self.now, 3), self.end),
        )

    # --- the machine, watched

    def signal(self, signal: Any) -> None:
        machine, before, attempt = self.machine, self.machine.state, self.machine.attempt
        row = TABLE.get((before, type(signal)))
        held = {role: holder.worker for role, holder in machine.holders.items()}
        actions = machine.on(signal)
        if row is None:
            assert actions == []
            assert (machine.state, machine.attempt) == (before, attempt)
            return
        foreign = getattr(signal, "attempt", attempt) != attempt and not isinstance(signal, Fenced | Found)
        assert machine.state in row.leads_to or (foreign and machine.state is before), (before, signal, machine.state)
        self.seen.add((before, type(signal), machine.state))
        assert machine.attempt >= attempt
        assert machine.attempt == attempt or isinstance(signal, Fenced)
        self._check_cancels(signal, attempt, held, actions)
        answered_at_once = (Encode, AskFence, EndStream)
        assert all(not isinstance(action, answered_at_once) for action in actions[:-1])
        for action in actions:
            self._carry_out(action)
        self.check()

    def _check_cancels(self, signal: Any, attempt: int, held: dict[str, str], actions: list[Any]) -> None:
        refused = isinstance(signal, Accepted) and signal.outcome is Outcome.REFUSED
        if (
            refused
            and held.get("decode" if signal.stage == "transfer" else signal.stage, signal.worker) != signal.worker
        ):
            assert actions == [], "another engine has it in hand"
        in_hand = isinstance(signal, PrefillNoted | KVTransferred) or (
            isinstance(signal, Accepted) and signal.outcome in IN_HAND
        )
        if not in_hand or signal.attempt > attempt:
            return
        told = [a for a in actions if isinstance(a, Cancel) and a.worker == signal.worker]
        stage = getattr(signal, "stage", "prefill" if isinstance(signal, PrefillNoted) else "decode")
        role = "decode" if stage == "transfer" else stage
        if signal.attempt < attempt or (role != "lookup" and held.get(role, signal.worker) != signal.worker):
            assert told, f"{signal} must be answered with a cancel"
            assert told[0].attempt >= signal.attempt

    def check(self) -> None:
        """No live state is without a way out, and nothing happens after the end."""
        machine = self.machine
        state = machine.state
        if state is State.ENDED:
            assert self.closed
            return
        assert not self.closed
        assert Timer.DEADLINE in self.timers
        assert (self.end is not None) == (state is State.ENDING)
        if state in WAYS_OUT:
            assert WAYS_OUT[state] in self.timers, f"{state} without {WAYS_OUT[state]}"
        elif state in (State.PREFILL, State.TRANSFER, State.DECODE):
            assert machine.holder() is not None
        elif state is not State.ENDING:
            assert {State.FENCING: "fence", State.ENCODING: "encode"}[state] in self.asked

    def _carry_out(self, action: Any) -> None:  # noqa: C901, PLR0912 - one short case for each action
        assert not self.closed, f"{action} after the end"
        match action:
            case Arm():
                assert action.delay_s >= 0
                self.timers[action.timer] = self.now + action.delay_s
            case Disarm():
                self.timers.pop(action.timer, None)
            case AskFind():
                if self.living_owner:
                    self.send("owner", "signal", Found(RID, "codec-9", 9, 7, "owner"))
                self.send("owner", "signal", Found(RID, DECODES[0], 9, 7, "decode", 12))
            case AskFence():
                self.asked.add("fence")
                self.send("owner", RELIABLE, "fence")
            case Encode():
                self.asked.add("encode")
                self.send("owner", RELIABLE, "encode")
            case Dispatch():
                assert self.machine.encoded
                self.send(LOOKUPS[1 if action.named else 0], "prompt", self.machine.attempt)
            case Cancel():
                assert action.attempt <= self.machine.attempt
                for worker in [action.worker] if action.worker else self.workers:
                    self.send(worker, "cancel", action.attempt)
            case Restart():
                assert action.attempt == self.machine.attempt
            case Progress():
                assert action.stage
            case EndStream():
                assert self.end is None, "a second end"
                self.end = action
                self.send("owner", "signal", Delivered())
            case AckIntake() | Forget():
                assert isinstance(action, Forget) or self.end is not None
                self.closed = True
                self.timers.clear()

    # --- the network and time

    def send(self, to: str, kind: str, *content: Any) -> None:
        self.net.append((to, kind, *content))

    def after(self, delay_s: float, worker: str, what: str, *content: Any) -> None:
        self.serial += 1
        self.events.append((self.now + delay_s, self.serial, worker, what, *content))

    def deliver(self, index: int = 0) -> None:
        to, kind, *content = self.net.pop(index)
        if to == "owner":
            self._owner(kind, content[0])
        elif self.workers[to].died_at < 0:
            getattr(self, f"_{kind}")(to, self.workers[to], *content)

    def _owner(self, kind: str, content: Any) -> None:
        if kind == "tokens":
            worker, attempt = content
            if self.machine.state not in (State.ENDED, State.ENDING) and attempt == self.machine.attempt:
                self.signal(Finished(FinishReason.STOP))
            self.send(worker, "forget", attempt)
        elif kind == "signal":
            if not self.closed:
                self.signal(content)
        elif content == "fence":
            self.asked.discard("fence")
            self.fence += 1
            self.signal(Fenced(self.fence))
        else:
            self.asked.discard("encode")
            self.ready_after -= 1
            self.signal(NotReady() if self.ready_after >= 0 else Encoded())

    def _due(self) -> tuple[Any, ...]:
        """The next thing that time brings."""
        due: list[tuple[Any, ...]] = [(at, 0, "owner", timer) for timer, at in self.timers.items()]
        due += [event for event in self.events if self.workers[event[2]].died_at < 0]
        holder = self.machine.holder()
        if holder is not None and self.workers[holder.worker].died_at >= 0:
            at = max(self.now, self.workers[holder.worker].died_at + NOTICED_S)
            due.append((at, 1, "watch", HolderLost(holder.worker, holder.epoch)))
        return min(due, key=lambda event: (event[0], event[1], str(event[2:])))

    def pass_time(self) -> None:
        at, _serial, who, what, *content = event = self._due()
        self.now = max(self.now, at)
        if who == "owner":
            del self.timers[what]
            self.signal(TimedOut(what))
        elif who == "watch":
            self.signal(what)
        else:
            self.events.remove(event)
            getattr(self, f"_{what}")(who, self.workers[who], *content)

    def step(self) -> None:
        if self.net:
            self.deliver()
        else:
            self.pass_time()

    def faults(self) -> list[tuple[Any, ...]]:
        """Everything that can go wrong now."""
        options: list[tuple[Any, ...]] = [("kill", name) for name, worker in self.workers.items() if worker.died_at < 0]
        for index, message in enumerate(self.net):
            if index:
                options.append(("overtake", index))
            if message[1] != RELIABLE:
                options += [("lose", index), ("double", index)]
        return [*options, ("delay", 0)] if self.net else options

    def suffer(self, fault: tuple[Any, ...]) -> None:
        what, which = fault
        named = self.net[which][2] if what == "lose" else which
        self.suffered += (f"{what} {type(named).__name__ if what in ('lose', 'hear') else named}",)
        match what:
            case "kill":
                self.workers[which].died_at = self.now
            case "overtake":
                self.deliver(which)
            case "lose":
                del self.net[which]
            case "double":
                self.net.append(self.net[which])
            case "delay":
                self.pass_time()
            case "hear":
                self.signal(which)

    # --- the workers

    def _say(self, worker: str, stage: str, attempt: int, outcome: Outcome, *others: str) -> None:
        answer = Accepted(RID, attempt, stage, worker, self.workers[worker].epoch, outcome, "codec-1")
        self.send("owner", "signal", answer)
        for other in others:
            self.send(other, "answer", stage, attempt, worker, outcome)

    def _fail(self, worker: str, stage: str, attempt: int) -> None:
        failed = StageFailed(
            RID, attempt, stage, worker, self.workers[worker].epoch, ErrorCode.INTERNAL, "why", not self.flawed
        )
        self.send("owner", "signal", failed)

    def _cancel(self, name: str, worker: Worker, attempt: int) -> None:
        worker.buried = max(worker.buried, 1 << 60 if attempt < 0 else attempt)
        worker.jobs = {a: phase for a, phase in worker.jobs.items() if a > worker.buried}

    def _prompt(self, name: str, worker: Worker, attempt: int) -> None:
        if attempt <= worker.buried:
            self._say(name, "lookup", attempt, Outcome.DEAD)
            return
        self._say(name, "lookup", attempt, Outcome.ACCEPTED)
        worker.jobs[attempt] = "offering"
        self._offer_prompt(name, worker, attempt, 0)

    def _offer_prompt(self, name: str, worker: Worker, attempt: int, choice: int) -> None:
        if worker.jobs.get(attempt) != "offering":
            return
        fresh = [p for p in PREFILLS if self.workers[p].died_at < 0 or self.now - self.workers[p].died_at < 0.3]
        if not fresh:
            self._fail(name, "lookup", attempt)
        elif choice >= len(fresh):
            self.send("owner", "signal", Accepted(RID, attempt, "prefill", name, worker.epoch, Outcome.BUSY, "codec-1"))
        else:
            self.send(fresh[choice], "matched", attempt, name)
            self.after(LIMITS.accept_timeout_s, name, "offer_prompt", attempt, choice + 1)

    def _answer(self, name: str, worker: Worker, stage: str, attempt: int, other: str, outcome: Outcome) -> None:
        if stage == "prefill" and outcome is not Outcome.BUSY:
            worker.jobs.pop(attempt, None)
        elif stage == "transfer" and worker.jobs.get(attempt) == "offering":
            if outcome in IN_HAND:
                worker.jobs[attempt] = "leased"
                self.after(LEASE_S, name, "lease_over", attempt)
            else:
                worker.jobs.pop(attempt)

    def _matched(self, name: str, worker: Worker, attempt: int, sender: str) -> None:
        if attempt <= worker.buried:
            self._say(name, "prefill", attempt, Outcome.DEAD, sender)
        elif attempt in worker.jobs:
            self._say(name, "prefill", attempt, Outcome.DUPLICATE, sender)
        elif self.busy > 0:
            self.busy -= 1  # only the sender hears of it
            self.send(sender, "answer", "prefill", attempt, name, Outcome.BUSY)
        elif name in self.refusing:
            self._say(name, "prefill", attempt, Outcome.REFUSED, sender)
        else:
            worker.jobs[attempt] = "computing"
            self._say(name, "prefill", attempt, Outcome.ACCEPTED, sender)
            self.after(STEP_S, name, "computed", attempt)

    def _computed(self, name: str, worker: Worker, attempt: int) -> None:
        if worker.jobs.get(attempt) == "computing":
            worker.jobs[attempt] = "offering"
            self.send("owner", "signal", PrefillNoted(RID, attempt, PLAN, DECODES[0], (), name, worker.epoch))
            self._offer_kv(name, worker, attempt, 0)

    def _offer_kv(self, name: str, worker: Worker, attempt: int, choice: int) -> None:
        if worker.jobs.get(attempt) == "offering":
            self.send(DECODES[choice % 2], "offered", attempt, name)
            self.after(LIMITS.accept_timeout_s * (1 + choice), name, "offer_kv", attempt, choice + 1)

    def _lease_over(self, name: str, worker: Worker, attempt: int) -> None:
        if worker.jobs.pop(attempt, "") == "leased":
            self._fail(name, "prefill", attempt)

    def _offered(self, name: str, worker: Worker, attempt: int, sender: str) -> None:
        if attempt <= worker.buried:
            self._say(name, "transfer", attempt, Outcome.DEAD, sender)
        elif attempt in worker.jobs:
            self._say(name, "transfer", attempt, Outcome.DUPLICATE, sender)
        elif name in self.refusing:
            self._say(name, "transfer", attempt, Outcome.REFUSED, sender)
        else:
            worker.jobs[attempt] = "reading"
            self._say(name, "transfer", attempt, Outcome.ACCEPTED, sender)
            self.after(STEP_S, name, "read", attempt, sender)

    def _read(self, name: str, worker: Worker, attempt: int, sender: str) -> None:
        if worker.jobs.get(attempt) != "reading":
            return
        if attempt not in self.workers[sender].jobs or self.workers[sender].died_at >= 0:
            worker.jobs.pop(attempt)
            self._fail(name, "transfer", attempt)
            return
        worker.jobs[attempt] = "decoding"
        self.send("owner", "signal", KVTransferred(RID, attempt, name, worker.epoch, 4096, 6, 0, (), PLAN))
        self.send(sender, "released", attempt)
        self.after(STEP_S, name, "decoded", attempt)

    def _released(self, _name: str, worker: Worker, attempt: int) -> None:
        worker.jobs.pop(attempt, None)

    def _decoded(self, name: str, worker: Worker, attempt: int) -> None:
        if worker.jobs.get(attempt) == "decoding":
            self.send("owner", "tokens", (name, attempt))
            self.after(0.1, name, "decoded", attempt)

    def _forget(self, _name: str, worker: Worker, attempt: int) -> None:
        worker.jobs.pop(attempt, None)


def run(world: World, max_steps: int = 20_000) -> World:
    """Without further faults, to the end of the request."""
    for _ in range(max_steps):
        if world.closed:
            return world
        world.step()
        assert world.now <= TIMEOUT_S + LIMITS.end_grace_s + 0.001, "past its deadline"
    raise AssertionError(f"no end in {max_steps} steps: {world.machine}")
