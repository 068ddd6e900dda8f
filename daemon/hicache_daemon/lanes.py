"""The CPU lane: a bounded set of threads that moves pages between engines' shared-memory pools and the arena.

    job:      QUEUED -a thread takes its first part-> RUNNING -last part ended-> ENDED (fence, then CopyEnded)
              QUEUED/RUNNING -cancel, detach, close, revoked by the client-> ENDED (fence FAILED, CopyEnded not ok)
    session:  ATTACHED -detach: its jobs end, then unmap-> gone

Several threads share one job: each takes a part in it, and the parts claim the job's steps one by one, so that a
thread which loses its core for a while leaves more to the others. The fence tells the slowest part's layers. Loads go
before stores: an engine waits for a load, nobody waits for a store. Every job is answered by exactly one CopyEnded,
posted after its fence is terminal, and a mapping goes only when no part of its session is queued or running, so no
thread ever touches memory that was unmapped.

`attach`, `detach`, `submit`, `cancel`, `fail_fence` and `done_fence` are called by one thread (the loop's);
`post` is called by any thread and must hand the event to the loop.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.ids import SessionId, TicketId
from hicache.copy.base import Bytes, GroupGeometry, Transfer
from hicache.copy.cpu import CpuMover
from hicache.copy.fence_area import FenceArea, FenceSlot, require_store_order
from hicache.copy.geometry import geometry_of
from hicache.core.commands import CopyPages, DoneFence, FailFence
from hicache.core.events import CopyEnded, Event
from hicache.protocol.fence import SLOT_BYTES
from hicache.spec.layout import L1Layout, check_layout
from hicache.spec.model import ModelSpec
from hicache_daemon.client_memory import ClientMemory
from hicache_daemon.prefault import Prefault

# A second thread costs a wake-up and contends for the interpreter; below this it does not pay.
PART_BYTES = 8 << 20
# The steps of one part: enough that no thread waits long for the last step of another.
STEPS_PER_PART = 8
MIN_STEP_BYTES = 1 << 20  # about 0.1 ms; a step costs about 10 µs beside the bytes


@dataclass(frozen=True, slots=True)
class LaneStats:
    """What a lane did since its start and has before it."""

    queued_loads: int  # parts
    queued_stores: int
    running: int
    bytes_to_l1: int
    bytes_to_l2: int
    copies_ok: int
    copies_failed: int
    copies_revoked: int  # of those that failed


class _Attached:
    """One session's mapped memory. `busy` counts its parts that are queued or running."""

    def __init__(self, pool: ClientMemory, fences: ClientMemory, slots: int, geometry: tuple[GroupGeometry, ...]):
        self.pool = pool
        self.fences = fences
        self.area: FenceArea | None = FenceArea(fences.bytes, slots)
        self.geometry = geometry
        self.layers = sum(len(group.layers) for group in geometry)
        self.busy = 0
        self._prefault = Prefault(pool.bytes)

    def unmap(self) -> None:
        """Nobody writes here any more: what waits for a word gets its last one. Then the memory goes."""
        if self.area is not None:
            self.area.fail_open()
        self.area = None
        self._prefault.stop()
        self.pool.close()
        self.fences.close()


@dataclass(slots=True)
class _Job:
    """A CopyPages under way. `layers[i]`: in so many layers part i has nothing left to move. In all before it starts,
    for then it has claimed nothing."""

    command: CopyPages
    attached: _Attached
    slot: FenceSlot | None  # None once the job has ended: it is a view of the client's memory
    transfers: tuple[Transfer, ...]
    bytes: int
    layers: list[int]
    parts_left: int
    claimed: int = 0  # steps
    told: int = 0  # layers
    running: bool = False
    error: HiCacheError | None = None
    was_revoked: bool = False  # when it ended
    movers: list[CpuMover] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell_running(self, part: int) -> None:
        """Before part `part` claims its first step: what was told before has been moved."""
        with self.lock:
            self.layers[part] = self.told
            if not self.running and self.slot is not None:
                self.slot.running()
                self.running = True

    def claim(self) -> int:
        with self.lock:
            self.claimed += 1
            return self.claimed - 1

    def tell_layers(self, part: int, count: int) -> None:
        """Part `part` has nothing left to move in `count` layers; the fence learns the slowest part's count.

        Steps are claimed in their order, so below the slowest all are claimed, and moved. The lock also orders this
        thread's bytes before the store of whichever thread tells the fence."""
        with self.lock:
            self.layers[part] = count
            slowest = min(self.layers)
            if slowest > self.told and self.slot is not None:
                self.slot.layers_done(slowest)
                self.told = slowest

    def revoked(self) -> bool:
        """Called by parts, so the slot is still there."""
        return self.slot is not None and self.slot.revoked()

    def tell_end(self) -> None:
        """Write the terminal state and let go of the slot. A slot that is another transfer's stays untouched.

        The last byte has moved, and the lock orders every part's bytes before this: a store whose source was
        overwritten in the meantime by a client that revoked it first is seen to be revoked here."""
        with self.lock:
            assert self.slot is not None
            self.was_revoked = self.slot.revoked()
            if self.was_revoked and not self.command.to_l1:
                self.error = self.error or HiCacheError(ErrorCode.TRANSFER_FAILED, "revoked")
            try:
                if self.error is None:
                    self.slot.done()
                else:
                    self.slot.failed(self.error.code)
            except HiCacheError as error:
                self.error = self.error or _bare(error)
            self.slot = None

    def fail(self, error: HiCacheError) -> None:
        """Keep the first reason and stop all parts. Too late once the fence is terminal: then it stays as told."""
        with self.lock:
            if self.slot is None:
                return
            self.error = self.error or error
            for mover in self.movers:
                mover.cancel()


@dataclass(frozen=True, slots=True)
class _Part:
    """One thread's share in a job: a `Share`. The terminal state is the job's."""

    job: _Job
    index: int

    def running(self) -> None:
        self.job.tell_running(self.index)

    def claim(self) -> int:
        return self.job.claim()

    def revoked(self) -> bool:
        return self.job.revoked()

    def layers_done(self, count: int) -> None:
        self.job.tell_layers(self.index, count)


class CpuLane:
    """Threads, queues and mappings for CPU engines. See the module's text for the life of a job."""

    def __init__(self, arena: Bytes, threads: int, post: Callable[[Event], None], max_parts: int = 1 << 16) -> None:
        """`arena`: the L2 arena. At most `max_parts` parts wait; a job beyond that fails with BUSY."""
        require_store_order()
        self._arena = arena
        self._post = post
        self._max_parts = max_parts
        self._loads: deque[_Part] = deque()
        self._stores: deque[_Part] = deque()
        self._change = threading.Condition()
        self._sessions: dict[SessionId, _Attached] = {}
        self._jobs: dict[TicketId, _Job] = {}
        self._running = 0
        self._closed = False
        self._bytes = {True: 0, False: 0}
        self._ended = {True: 0, False: 0}
        self._revoked = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"hicache-copy-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    # ---- sessions ---------------------------------------------------------------------------------------

    def attach(  # noqa: PLR0913 - what Attach and Hello say of a client's memory, each checked here
        self,
        session: SessionId,
        pool_fd: int,
        pool_bytes: int,
        fence_fd: int,
        fence_slots: int,
        *,
        model: ModelSpec,
        layout: L1Layout,
    ) -> None:
        """Map a client's pool and fence area; the descriptors stay the caller's to close.

        Raises `HiCacheError(BAD_SPEC | NO_SPACE)` when the memory is smaller than declared, could shrink, or
        cannot be mapped, or when the layout leaves the pool. Nothing stays mapped then.
        """
        check_layout(model, layout)
        if layout.pool_bytes > pool_bytes:
            raise HiCacheError(
                ErrorCode.BAD_SPEC,
                f"the layout spans {layout.pool_bytes} bytes, the attached pool has {pool_bytes}",
                "attach the whole pool",
            )
        if session in self._sessions:
            raise HiCacheError(ErrorCode.BAD_SPEC, f"session {session} is attached already")
        pool = ClientMemory(pool_fd, pool_bytes, "the L1 pool")
        try:
            fences = ClientMemory(fence_fd, fence_slots * SLOT_BYTES, "the fence area")
        except HiCacheError:
            pool.close()
            raise
        attached = _Attached(pool, fences, fence_slots, geometry_of(model, layout))
        with self._change:
            self._sessions[session] = attached

    def detach(self, session: SessionId) -> None:
        """End the session's copies, fail the fences still open, unmap its memory; afterwards no thread touches it.

        A client that hung up with a request on the way, one that is never read, waits for its fence all the same:
        without a last word its blocks in L1 would stay lent for ever. Idempotent.

        Returns at once when no copy runs (the rule: the cache state drops a session after its last ticket);
        otherwise within about the time of one call of the mover.
        """
        with self._change:
            attached = self._sessions.pop(session, None)
            jobs = [job for job in self._jobs.values() if job.attached is attached]
        if attached is None:
            return
        for job in jobs:
            self._stop(job, HiCacheError(ErrorCode.UNKNOWN_SESSION, "the session's memory is gone"))
        with self._change:
            self._change.wait_for(lambda: attached.busy == 0)
        attached.unmap()

    # ---- jobs -------------------------------------------------------------------------------------------

    def submit(self, command: CopyPages) -> None:
        """Queue a copy. Answered by exactly one CopyEnded, whatever happens; never raises for the job's sake."""
        try:
            self._enqueue(command)
        except HiCacheError as error:
            self._post(CopyEnded(command.ticket, False, str(error)))

    def _enqueue(self, command: CopyPages) -> None:
        with self._change:
            attached = self._sessions.get(command.session)
            if self._closed or attached is None or attached.area is None:
                raise HiCacheError(ErrorCode.UNKNOWN_SESSION, f"no memory of session {command.session} is mapped")
            slot = attached.area.slot(command.fence, command.generation)
            queue = self._loads if command.to_l1 else self._stores
            if len(self._loads) + len(self._stores) >= self._max_parts:
                with contextlib.suppress(HiCacheError):  # the slot is another transfer's: it stays untouched
                    slot.failed(ErrorCode.BUSY)
                raise HiCacheError(ErrorCode.BUSY, f"{self._max_parts} pieces of copying wait already")
            size = sum(
                len(copy.l1) * geometry.block_layer_bytes * len(geometry.layers)
                for copy in command.copies
                for geometry in attached.geometry[copy.group : copy.group + 1]
            )
            count = max(1, min(len(self._threads), size // PART_BYTES))
            transfers = tuple(Transfer(copy.group, copy.l2_offsets, copy.l1) for copy in command.copies)
            job = _Job(command, attached, slot, transfers, size, [attached.layers] * count, count)
            self._jobs[command.ticket] = job
            attached.busy += count
            queue.extend(_Part(job, i) for i in range(count))
            self._change.notify_all()

    def cancel(self, ticket: TicketId) -> None:
        """End this copy soon; its CopyEnded still comes. Unknown tickets are ignored: it may just have ended."""
        with self._change:
            job = self._jobs.get(ticket)
        if job is not None:
            self._stop(job, HiCacheError(ErrorCode.TRANSFER_FAILED, "cancelled"))

    def _stop(self, job: _Job, error: HiCacheError) -> None:
        """Fail a job; parts that wait end here, running ones in their threads."""
        job.fail(error)
        self._withdraw(job)

    def _withdraw(self, job: _Job) -> None:
        """End the job's parts that wait: nothing is left to them."""
        queue = self._loads if job.command.to_l1 else self._stores
        with self._change:
            waiting = [part for part in queue if part.job is job]
            for part in waiting:
                queue.remove(part)
        for part in waiting:
            self._end_part(part)

    # ---- fences without a copy --------------------------------------------------------------------------

    def fail_fence(self, command: FailFence) -> bool:
        """Write FAILED. False when the session or the slot's generation is not there any more: no one waits."""
        return self._tell(command, lambda slot: slot.failed(command.code))

    def done_fence(self, command: DoneFence) -> bool:
        """Write DONE for a transfer that had nothing to copy. False as in `fail_fence`."""
        return self._tell(command, lambda slot: slot.done())

    def _tell(self, command: FailFence | DoneFence, write: Callable[[FenceSlot], None]) -> bool:
        attached = self._sessions.get(command.session)
        if attached is None or attached.area is None:
            return False
        try:
            write(attached.area.slot(command.fence, command.generation))
        except HiCacheError:
            return False
        return True

    # ---- the end ----------------------------------------------------------------------------------------

    def drain(self, timeout_s: float) -> bool:
        """Wait until every copy has ended, at most `timeout_s`; True when none is left. Blocks: not on the loop."""
        with self._change:
            return self._change.wait_for(lambda: not self._jobs, timeout_s)

    def close(self) -> None:
        """Cancel what is left, join the threads, unmap all sessions. Idempotent."""
        with self._change:
            self._closed = True
            self._change.notify_all()
            sessions = list(self._sessions)
        for session in sessions:
            self.detach(session)
        for thread in self._threads:
            thread.join()

    def stats(self) -> LaneStats:
        with self._change:
            return LaneStats(
                len(self._loads),
                len(self._stores),
                self._running,
                self._bytes[True],
                self._bytes[False],
                self._ended[True],
                self._ended[False],
                self._revoked,
            )

    # ---- threads ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._loads or self._stores or self._closed)
                if not self._loads and not self._stores:
                    return
                part = self._loads.popleft() if self._loads else self._stores.popleft()
                self._running += 1
            self._copy(part)
            if len(part.job.layers) > 1:
                self._withdraw(part.job)
            with self._change:
                self._running -= 1
            self._end_part(part)
            del part  # an idle thread must not keep a mapping's views alive

    def _copy(self, part: _Part) -> None:
        job = part.job
        step_bytes = max(MIN_STEP_BYTES, job.bytes // (len(job.layers) * STEPS_PER_PART))
        mover = CpuMover(self._arena, step_bytes)
        with job.lock:
            if job.error is not None:
                return
            job.movers.append(mover)
        pool = job.attached.pool.bytes
        try:
            mover.copy(pool, job.attached.geometry, job.transfers, job.command.to_l1, part)
        except HiCacheError as error:
            job.fail(_bare(error))
        except Exception as error:  # noqa: BLE001 - reported: a thread that died silently would owe a CopyEnded
            job.fail(HiCacheError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"))

    def _end_part(self, part: _Part) -> None:
        """Count a part as ended; the last one tells the fence, lets go of the memory and posts CopyEnded."""
        job = part.job
        with job.lock:
            job.parts_left -= 1
            last = job.parts_left == 0
        if last:
            job.tell_end()
        with self._change:
            job.attached.busy -= 1
            if last:
                del self._jobs[job.command.ticket]
                self._ended[job.error is None] += 1
                self._revoked += job.error is not None and job.was_revoked
                if job.error is None:
                    self._bytes[job.command.to_l1] += job.bytes
            self._change.notify_all()
        if last:
            self._post(CopyEnded(job.command.ticket, job.error is None, str(job.error) if job.error else ""))


def _bare(error: HiCacheError) -> HiCacheError:
    """The same error without its traceback, whose frames hold views of a client's memory."""
    return HiCacheError(error.code, error.message, error.remedy)
