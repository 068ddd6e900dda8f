"""Sessions open and close, leases are renewed, given back and expire. See sessions.py for the states."""

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.core.commands import CancelCopy, DropSession
from hicache.core.commands import Reply as ReplyCommand
from hicache.core.events import ReleaseAsked, RenewAsked, SessionClosed, SessionOpened
from hicache.core.promote import close_load, close_prefetch
from hicache.core.sessions import ACTIVE, CLOSING, SUSPECT, Session, Shape, open_session
from hicache.core.transfers import COPYING, LoadTicket, PrefetchTicket, StoreTicket
from hicache.core.world import World
from hicache.pool.blocks import parent_bytes_for
from hicache.protocol.messages import ClientLimits, Done, Refuse, Welcome
from hicache.protocol.version import VERSION
from hicache.spec.layout import check_layout


def opened(world: World, event: SessionOpened) -> None:
    """Welcome, or Refuse followed by DropSession."""
    if event.session in world.sessions:  # ids are the loop's: this one is taken, and must not be dropped
        _refuse(world, event, HiCacheError(ErrorCode.MALFORMED, f"session {event.session} is open already"))
        return
    try:
        session = _admit(world, event)
    except HiCacheError as error:
        _refuse(world, event, error)
        world.out.append(DropSession(event.session, error.message))
        return
    for other in list(world.sessions.values()):
        if other.instance == event.instance and other.state != CLOSING:
            close(world, other, f"superseded by epoch {event.epoch}")
    session.heard_s = world.now_s
    world.sessions[session.id] = session
    limits = world.limits
    told = ClientLimits(
        requests_in_flight=limits.requests_in_flight,
        tokens_per_request=limits.tokens_per_request,
        body_bytes=limits.body_bytes,
        buffer_bytes=limits.buffer_bytes,
        leases_per_session=limits.leases_per_session,
        lease_ttl_s=limits.lease_ttl_s,
        session_silence_s=limits.session_silence_s,
    )
    welcome = Welcome(VERSION, event.session, told, world.config.features)
    world.out.append(ReplyCommand(event.session, event.request, welcome))


def _refuse(world: World, event: SessionOpened, error: HiCacheError) -> None:
    world.counters.rejected_requests += 1
    message = Refuse(error.code.value, error.message, error.remedy)
    world.out.append(ReplyCommand(event.session, event.request, message))


def _admit(world: World, event: SessionOpened) -> Session:
    """Raises `HiCacheError` unless this session may be opened; changes nothing but an unused pool's cut."""
    limits = world.limits
    if world.draining:
        raise HiCacheError(ErrorCode.DRAINING, "the daemon is stopping", "run uncached and connect again later")
    live = [each for each in world.sessions.values() if each.state != CLOSING]
    if any(each.instance == event.instance and each.tenant != event.tenant for each in live):
        raise HiCacheError(  # before the epochs: what those of another tenant are is not told
            ErrorCode.DENIED,
            "this instance id is in use by another client",
            "draw a random instance id per client",
        )
    for each in live:
        if each.instance == event.instance and each.epoch >= event.epoch:
            raise HiCacheError(
                ErrorCode.DENIED,
                f"epoch {event.epoch} of this instance is not larger than the open epoch {each.epoch}",
                "every incarnation needs a larger epoch; two clients must not share an instance id",
            )
    if len(world.sessions) >= limits.sessions:
        raise HiCacheError(ErrorCode.BUSY, f"{len(world.sessions)} sessions are open, the limit", "try again later")
    event.model.check(limits.groups, limits.layers)
    event.shard.check()
    check_layout(event.model, event.layout, limits.pool_bytes)
    session = open_session(event, world.secret)
    _fit_pool(world, session.shape, live)
    return session


def _fit_pool(world: World, shape: Shape, live: list[Session]) -> None:
    """See to it that the model's blocks fit a parent; an unused pool may be cut anew. Raises `HiCacheError`."""
    pool = world.pool
    largest = max(group.block_bytes for group in shape.groups)
    if largest > pool.arena_bytes:
        raise HiCacheError(
            ErrorCode.NO_SPACE,
            f"one page of this model takes {largest} bytes, L2 has {pool.arena_bytes}",
            "raise l2.size",
        )
    auto = world.config.parent_bytes is None
    if auto and not pool.used_blocks() and (largest > pool.parent_bytes or not live):
        others = [group.block_bytes for each in live for group in each.shape.groups]
        wanted = parent_bytes_for(max([largest, *others]), pool.arena_bytes)
        pool.format(min(wanted, pool.arena_bytes))
    for group in shape.groups:
        pool.view(group.block_bytes)


def closed(world: World, event: SessionClosed) -> None:
    session = world.sessions.get(event.session)
    if session is None or session.state == CLOSING:
        return
    if event.request:
        world.reply(session.id, event.request, Done())
    close(world, session, event.reason)


def close(world: World, session: Session, reason: str) -> None:
    """Give back all that a session owns. Copies that touch its memory are cancelled and waited for."""
    session.state = CLOSING
    session.reason = reason
    for lease_id in list(session.leases):
        lease = world.leases.get(lease_id)
        assert lease is not None, "a session names live leases"
        world.end_lease(lease)
    for ticket_id in list(session.tickets):
        ticket = world.tickets.get(ticket_id)
        if isinstance(ticket, PrefetchTicket):
            close_prefetch(world, ticket)
        elif isinstance(ticket, LoadTicket) and ticket.phase != COPYING:
            close_load(world, ticket)
        elif isinstance(ticket, LoadTicket | StoreTicket):
            world.out.append(CancelCopy(ticket.id))
    drop_if_done(world, session)


def drop_if_done(world: World, session: Session) -> None:
    """The last copy that touched a closed session's memory has ended: it may be unmapped."""
    if session.state == CLOSING and not session.tickets:
        del world.sessions[session.id]
        world.out.append(DropSession(session.id, session.reason))


def renew(world: World, event: RenewAsked) -> None:
    """Answers with the number of leases still held; without leases it is a heartbeat."""
    session = world.client(event.session)
    held = 0
    for lease_id in event.leases:
        lease = world.lease_for(session, lease_id)
        if lease is not None:
            world.leases.renew(lease, world.now_s + world.limits.lease_ttl_s)
            held += 1
    world.reply(event.session, event.request, Done(count=held))


def release(world: World, event: ReleaseAsked) -> None:
    """Idempotent: leases that are not there, or not this session's nor its engine's, are passed over."""
    session = world.client(event.session)
    ended = 0
    for lease_id in event.leases:
        lease = world.lease_for(session, lease_id)
        if lease is not None:
            world.end_lease(lease)
            ended += 1
    world.reply(event.session, event.request, Done(count=ended))


def tick(world: World) -> None:
    """Leases nobody renewed end, unless a load of theirs is running; silent sessions become SUSPECT."""
    for lease in world.leases.expired(world.now_s):
        if lease.tickets:
            world.leases.renew(lease, world.now_s + world.limits.lease_ttl_s)
        else:
            world.counters.expired_leases += 1
            world.end_lease(lease)
    for session in world.sessions.values():
        if session.state == ACTIVE and world.now_s - session.heard_s > world.limits.session_silence_s:
            session.state = SUSPECT
