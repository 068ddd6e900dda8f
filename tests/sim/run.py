"""One simulated run: a seed decides everything, so a failure is `python -m tests.sim --seed N` away.

clients ─ requests (lost, malformed, late) ─► CacheState.handle ─► check of all laws ─► commands
   ▲                                               ▲                                     │
   └────────────── replies, fences ────────────────┼── answers: delayed, out of order, twice
                                                   └── lanes, store, clock, mode of the disk ◄┘
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

from hicache.base.ids import SessionId
from hicache.core.commands import (
    Announce,
    CancelCopy,
    Command,
    CopyPages,
    DeleteRecords,
    DoneFence,
    DropSession,
    FailFence,
    ReadRecords,
    Reply,
    TouchRecords,
    WriteRecords,
)
from hicache.core.events import Drain, Event, LoadAsked, ReleaseAsked, SessionClosed, StoreModeChanged, Tick
from hicache.core.residency import READY, Residency
from hicache.core.state import CacheState, CoreConfig
from hicache.core.transfers import StoreTicket
from hicache.core.world import Announced
from hicache.policy.evict.lru import Lru
from hicache.protocol.messages import Accepted, Busy, Done, Error, Refuse, Welcome
from tests.sim.backend import Lanes, Memory, SimStore
from tests.sim.client import HeldLease, SimClient
from tests.sim.contents import LIMITS, MODELS, OTHER_SHARDS, SECRET, SimFailure, SimModel, Truth
from tests.sim.digest import digest
from tests.sim.router import TENANT, SimRouter


@dataclass
class Outcome:
    """What a run did, so that tests can see that it did something."""

    events: int
    counters: dict[str, int]


@dataclass
class Engine:
    """What the processes of one engine have in common: they tell each other of their leases."""

    model: SimModel
    leases: list[HeldLease] = field(default_factory=list)


class Simulation:
    """`laws=False` leaves only what the outside can see: wrong bytes, races, lost or doubled answers."""

    def __init__(self, seed: int, *, laws: bool = True) -> None:
        self.rng = rng = Random(seed)
        self.laws = laws
        self.now_s = 0.0
        self.events = 0
        self.memory, self.truth = Memory(), Truth()
        l3_mode = rng.choice(("rw", "rw", "rw", "rw", "off"))
        capacity = rng.choice((3, 20, 60, 400)) * 8192 + rng.randint(0, 8191)
        config = CoreConfig(
            arena_bytes=rng.choice((1024, 2048, 4096, 16384)),
            parent_bytes=rng.choice((512, 768, 640)),
            l3_mode=l3_mode,
            l3_capacity_bytes=capacity,
            write_policy=rng.choice(("write_through", "write_through", "write_back", "none")),
            announced=Announced(frozenset((TENANT,))),
        )
        if rng.random() < 0.4:  # a small L2 over a large L3: promotion all the time
            capacity = 400 * 8192
            config = replace(config, arena_bytes=1536, l3_mode="rw", l3_capacity_bytes=capacity)
            config = replace(config, write_policy=rng.choice(("write_through", "write_back")))
        self.state = CacheState(config, LIMITS, SECRET)
        world = self.state.world
        world.residency = Residency(rows=16)  # columns grow and queues are compacted within every run
        world.residency.moved = []
        world.evict_l2, world.evict_l3 = Lru(16, slack_rows=32), Lru(16, slack_rows=32)
        self.router = SimRouter(seed, self.truth)
        self.lanes = Lanes(rng, self.memory)
        self.store = SimStore(rng, self.memory, self.truth, capacity)
        self.store.mode = config.l3_mode
        self.answers: list[Event] = []
        self.past: list[Event] = []
        self.clients: list[SimClient] = []
        self.gone: dict[SessionId, SimClient] = {}
        self.next_session = 1
        self.epochs: dict[bytes, int] = {}
        self.engines: dict[tuple[str, bytes], Engine] = {}
        self.owners: dict[int, SessionId] = {}  # of leases
        self.met: Counter[str] = Counter()
        self.models = rng.choice(((1, 0, 0), (0, 1, 0), (5, 3, 1)))
        self.prompts = self._prompts()

    def _prompts(self) -> list[bytes]:
        """A few trunks, each with branches that part at any token."""
        rng, prompts = self.rng, list[bytes]()
        for _ in range(2):
            trunk = [rng.randrange(3) for _ in range(rng.randint(8, 40))]
            prompts.append(_tokens(trunk))
            for _ in range(3):
                cut = rng.randint(0, len(trunk))
                prompts.append(_tokens(trunk[:cut] + [rng.randrange(3) for _ in range(rng.randint(1, 24))]))
        return prompts

    # ---- one event -----------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        self.events += 1
        try:
            commands = self.state.handle(event, self.now_s)
            if self.laws:
                self.state.check()
            self.router.hear(self.state.world, commands)
            self.router.check(self.state.world)
        except Exception as error:  # whatever it is, it is raised again with its story
            error.add_note(f"event {self.events}: {event}")
            raise
        for command in commands:
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case Reply():
                self._reply(command)
            case CopyPages():
                self._start_copy(command)
            case CancelCopy():
                self.lanes.cancel(command.ticket)
            case FailFence():
                self.lanes.end_fence(command.session, command.generation, "failed")
            case DoneFence():
                self.lanes.end_fence(command.session, command.generation, "done")
            case ReadRecords():
                self._nobody_touches(self.store.offsets(command), "a read's target")
                self.store.reads.append(command)
            case WriteRecords():
                self._nobody_writes(self.store.offsets(command), "a write's source")
                self.store.writer.append(command)
            case DeleteRecords():
                self.store.writer.append(command)
            case DropSession():
                self._drop(command.session)
            case TouchRecords() | Announce():
                pass

    def _start_copy(self, command: CopyPages) -> None:
        if any(each.session == command.session and not each.pool for each in (*self.clients, *self.gone.values())):
            raise SimFailure(f"a copy for session {command.session}, which has no memory")
        offsets = {int(o) for copy in command.copies for o in copy.l2_offsets}
        if command.to_l1:
            self._nobody_writes(offsets, "a load's source")
        else:
            self._nobody_touches(offsets, "a store's target")
        self.lanes.submit(command)

    def _nobody_writes(self, offsets: set[int], what: str) -> None:
        reading = set().union(*(self.store.offsets(read) for read in self.store.reads))
        if offsets & (self.lanes.written() | reading):
            raise SimFailure(f"{what} is being written")

    def _nobody_touches(self, offsets: set[int], what: str) -> None:
        self._nobody_writes(offsets, what)
        sources = (self.store.offsets(w) for w in self.store.writer if isinstance(w, WriteRecords))
        if offsets & (self.lanes.read() | set().union(*sources)):
            raise SimFailure(f"{what} is being read")

    def _reply(self, reply: Reply) -> None:
        client = next((each for each in self.clients if each.session == reply.session), None)
        if client is None:
            if reply.session in self.gone or reply.session >= 1 << 30:
                return
            raise SimFailure(f"an answer to nobody: {reply}")
        if isinstance(reply.message, Welcome):
            client.open = True
        if isinstance(reply.message, Refuse):
            client.requests.clear()
            self._forget(client)
            return
        self._count_met(client, reply)
        client.hear(reply.request, reply.message)
        self.owners.update((lease.id, lease.owner) for lease in client.leases)

    def _count_met(self, client: SimClient, reply: Reply) -> None:
        """What the processes of one engine did with each other's leases."""
        asked = client.requests.get(reply.request)
        event, message = None if asked is None else asked.event, reply.message
        if isinstance(event, LoadAsked) and self.owners.get(event.lease, client.session) != client.session:
            self.met["engine_loads"] += isinstance(message, Accepted)
            alone = self.owners[event.lease] in self.gone
            self.met["engine_loads_outlived_the_lease"] += alone and isinstance(message, Done)
        if isinstance(event, ReleaseAsked) and isinstance(message, Done) and message.count:
            self.met["engine_releases"] += self.owners.get(event.leases[0], client.session) != client.session

    def _drop(self, session: SessionId) -> None:
        """Its memory is unmapped: whoever still copies crashes."""
        if any(job.command.session == session for job in self.lanes.jobs.values()):
            raise SimFailure(f"the memory of session {session} was unmapped under a copy")
        for place in [place for place in self.memory.l1 if place[0] == session]:
            del self.memory.l1[place]
        for client in self.clients:
            if client.session == session:
                self._forget(client)
                return

    def _forget(self, client: SimClient) -> None:
        self.clients.remove(client)
        self.gone[client.session] = client

    # ---- what may happen -----------------------------------------------------------------------------

    def step(self) -> None:
        rng = self.rng
        self.now_s += rng.choice((0.0, 0.01, 0.1, 0.5))
        choices = [(self._speak, 10), (self._new_client, 3 if len(self.clients) < 3 else 0.2), (self._time, 1)]
        choices += [(self._misspeak, 1), (self._kill, 0.25), (self._goodbye, 0.15), (self._mode, 0.1)]
        choices += [(self._repeat, 0.5)]
        if self.lanes.jobs:
            choices.append((self._copy, 8))
        if self.store.reads:
            choices.append((self._read, 3))
        if self.store.writer:
            choices.append((self._write, 3))
        if self.answers:
            choices.append((self._answer, 8))
        rng.choices([act for act, _ in choices], [weight for _, weight in choices])[0]()

    def _speak(self) -> None:
        speaking = [client for client in self.clients if client.open]
        if not speaking:
            return
        client = self.rng.choice(speaking)
        event = client.say_something()
        if event is None:
            return
        if self.rng.random() < 0.03:  # lost on the way: the client gives up, its blocks are its own again
            asked = client.requests.pop(event.request)  # type: ignore[union-attr]
            if asked.transfer is not None:
                for g, starts in enumerate(asked.transfer.starts):
                    client.busy[g].difference_update(starts)
            return
        self.feed(event)

    def _misspeak(self) -> None:
        speaking = [client for client in self.clients if client.open]
        if not speaking:
            return
        client = self.rng.choice(speaking)
        event = client.malformed(self.clients)
        before = digest(self.state.world)
        commands = self.state.handle(event, self.now_s)
        if digest(self.state.world) != before:
            raise SimFailure(f"a refused request changed the state: {event}")
        if (
            len(commands) != 1
            or not isinstance(commands[0], Reply)
            or not isinstance(commands[0].message, Error | Busy)
        ):
            raise SimFailure(f"a bad request was not refused by exactly one answer: {event} -> {commands}")

    def _new_client(self) -> None:
        rng = self.rng
        instance = bytes([rng.randrange(4)]) * 16
        epoch = self.epochs.get(instance, 0) + rng.choice((1, 1, 1, 0, -1))
        live = [each for each in self.clients if each.instance == instance]
        tenant, group = rng.choice(("t1", "t1", "t1", "t2")), rng.choice((b"", b"g" * 16, b"g" * 16))
        engine = self._engine(tenant, group)
        shards = (engine.model, OTHER_SHARDS[engine.model.spec.name])
        client = SimClient(
            rng,
            self.memory,
            self.truth,
            rng.choices(shards, (4, 1))[0],
            tenant,
            SessionId(self.next_session),
            instance,
            epoch,
            self.prompts,
            engine.leases,
            group,
            pool=not group or rng.random() < 0.6,
        )
        self.next_session += 1
        self.epochs[instance] = max(epoch, self.epochs.get(instance, 0))
        for other in live:
            if other.epoch < epoch:
                other.open = False  # superseded, whether it knows or not
        self.clients.append(client)
        self.feed(client.hello())

    def _engine(self, tenant: str, group: bytes) -> Engine:
        """The one of a group, if it has one. Tenants that draw the same group serve the same model."""
        if not group:
            return Engine(self.rng.choices(MODELS, self.models)[0])
        if (tenant, group) not in self.engines:
            model = next((each.model for each in self.engines.values()), self.rng.choices(MODELS, self.models)[0])
            self.engines[tenant, group] = Engine(model)
        return self.engines[tenant, group]

    def _kill(self) -> None:
        """Lifeline EOF. It may be reported twice, or after another incarnation came."""
        if self.clients:
            client = self.rng.choice(self.clients)
            client.open = False
            client.requests.clear()
            for _ in range(self.rng.choice((1, 1, 2))):
                self.feed(SessionClosed(client.session, "lifeline"))

    def _goodbye(self) -> None:
        speaking = [client for client in self.clients if client.open]
        if speaking:
            client = self.rng.choice(speaking)
            client.open = False
            client.requests.clear()
            client.requests[0] = None  # type: ignore[assignment]
            event = SessionClosed(client.session, "goodbye", client._request())
            client.requests = {}
            self.gone[client.session] = client
            self.clients.remove(client)
            self.feed(event)

    def _time(self) -> None:
        self.now_s += self.rng.choice((0.1, 1.0, 6.0))
        self.feed(Tick())

    def _mode(self) -> None:
        store, rng = self.store, self.rng
        if self.state.world.config.l3_mode == "off":
            return
        mode = rng.choice(("rw", "rw", "ro", "off"))
        if store.mode == "off" and mode != "off":
            self._come_back()
        store.mode = mode
        self.feed(StoreModeChanged(mode, "simulated"))

    def _come_back(self) -> None:
        """What was ordered of a store that is off fails; then its rows are streamed, before it takes writes."""
        while self.store.writer:
            self.answers.append(self.store.write_one())
        self.store.mode = "ro"
        self.feed(StoreModeChanged("ro", "simulated"))
        self.feed(self.store.recovered())

    def _repeat(self) -> None:
        """An answer comes twice, or long after."""
        if self.past:
            self.feed(self.rng.choice(self.past))

    def _copy(self) -> None:
        event = self.lanes.advance()
        if event is not None:
            self.answers.append(event)

    def _read(self) -> None:
        self.answers.append(self.store.read_one())

    def _write(self) -> None:
        self.answers.append(self.store.write_one())

    def _answer(self) -> None:
        event = self.answers.pop(self.rng.randrange(len(self.answers)))
        ticket = self.state.world.tickets.get(event.ticket)  # type: ignore[union-attr]
        if isinstance(ticket, StoreTicket) and event.ok:  # type: ignore[union-attr]
            self.truth.stored.update(self.state.world.residency.key[row] for row in ticket.rows.tolist())
        self.past.append(event)
        self.feed(event)

    # ---- a whole run ---------------------------------------------------------------------------------

    def run(self, steps: int) -> Outcome:
        for _ in range(steps):
            self.step()
            self.router.step()
            if self.events % 16 == 0:
                self._check_bytes()
            if self.events % 32 == 0:
                self.router.join(self.state.survey(part_pages=2))
        self._quiesce()
        return Outcome(self.events, self.state.world.counters.as_dict() | self.met)

    def _check_bytes(self) -> None:
        """Every page that lookups may see holds exactly the bytes of its key, in every group."""
        world = self.state.world
        for row in (world.residency.l2 >= READY).nonzero()[0].tolist():
            namespace = world.namespaces[int(world.residency.namespace[row])]
            for g, (group, view) in enumerate(zip(namespace.shape.groups, world.views(namespace.shape), strict=True)):
                offset = int(view.offset_bytes(world.residency.block[g, [row]])[0])
                found = [self.memory.l2.get(offset + place * group.start_bytes) for place in range(group.starts)]
                if found != self.truth.content_of[(world.residency.key[row], group.name)]:
                    raise SimFailure(f"row {row}: visible bytes are not its own: {found}\n" + self._story(row))

    def _story(self, row: int) -> str:
        return self.state.world.story.of_row(self.state.world.residency, row)

    def _quiesce(self) -> None:
        """Everybody leaves, everything ends: nothing may be pinned, open or lost."""
        if self.rng.random() < 0.3:
            self.feed(Drain())
            self._settle()
        self._settle()
        self._check_answered()
        for client in list(self.clients):
            client.open = False
            client.requests.clear()
            self.feed(SessionClosed(client.session, "end"))
        self._settle()
        self.now_s += 1000.0
        self.feed(Tick())
        self._settle()
        self._check_bytes()
        world = self.state.world
        if not self.state.idle() or len(world.leases) or world.sessions or world.residency.pins.any():
            raise SimFailure(f"something is left: {self.state.snapshot()}")
        used = sum(view.used_blocks for view in world.pool.views)
        ready = sum(
            int(world.namespaces.l2_pages[ns.index]) * len(ns.shape.groups)
            for ns in world.namespaces.by_id.values()
            if ns.bound
        )
        if used != ready:
            raise SimFailure(f"{used} blocks are in use, READY pages have {ready}")
        must = {(c.session, generation) for c in self.gone.values() for generation in c.ended}
        if must - self.lanes.fences.keys():
            raise SimFailure(f"fences were never ended: {must - self.lanes.fences.keys()}")
        for (session, generation), states in self.lanes.fences.items():
            if len(states) != 1:
                raise SimFailure(f"fence {generation} of session {session} ended as {states}")

    def _settle(self) -> None:
        while self.lanes.jobs or self.store.reads or self.store.writer or self.answers:
            if self.lanes.jobs:
                self._copy()
            if self.store.reads:
                self._read()
            if self.store.writer:
                self._write()
            if self.answers:
                self._answer()

    def _check_answered(self) -> None:
        for client in self.clients:
            if client.open and client.requests:
                raise SimFailure(f"never answered: {client.requests}")


def _tokens(values: list[int]) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def simulate(seed: int, steps: int = 300, *, laws: bool = True) -> Outcome:
    """Run one seed. Raises `SimFailure` or `LawBroken`."""
    try:
        return Simulation(seed, laws=laws).run(steps)
    except Exception as error:  # whatever it is, it is raised again with the command that repeats it
        error.add_note(f"seed {seed}: python -m tests.sim --seed {seed} --steps {steps}")
        raise
