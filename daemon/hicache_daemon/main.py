"""The one place that constructs objects, in the order in which they need each other, and takes them down."""

# ruff: noqa: PLW0108 - the lambdas name what is bound further down

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import uvloop

from hicache.base.errors import HiCacheError
from hicache.base.ids import SessionId
from hicache.core.events import SessionClosed
from hicache.core.state import CacheState
from hicache.core.world import Announced, CoreConfig
from hicache.store.lmdb import LmdbOptions, LmdbStore
from hicache_daemon.admin.describe import Describer
from hicache_daemon.admission import Tenants
from hicache_daemon.arena import Arena
from hicache_daemon.config.settings import Settings
from hicache_daemon.descriptors import raise_limit, sessions_that_fit
from hicache_daemon.early_signals import handle_early_signals
from hicache_daemon.front import Front
from hicache_daemon.inbox import Inbox
from hicache_daemon.kv_events import KvEvents, Numbers, Options
from hicache_daemon.lanes import CpuLane
from hicache_daemon.lifecycle import Daemon, Life, Parts
from hicache_daemon.lifeline import Lifeline
from hicache_daemon.log import LevelGate, make_log
from hicache_daemon.loop import CacheLoop
from hicache_daemon.memcpy import restart_tuned
from hicache_daemon.notify import Notifier
from hicache_daemon.priority import favour_thread
from hicache_daemon.reload import ConfigSource, Reloader
from hicache_daemon.runtime_dir import RuntimeDir
from hicache_daemon.secret import RECORDS_NAME, load_secret
from hicache_daemon.server import Server
from hicache_daemon.sessions import Sessions
from hicache_daemon.stores import Note, StoreOptions, StoreThreads
from hicache_daemon.watchdog import LagGauge, Watchdog

EXIT_FAILURE = 1
TOUCH_THREADS = 16
SWITCH_INTERVAL_S = 0.0005  # the loop gets the GIL back from a copy thread within this; CPython's own is 5 ms


class MonotonicClock:
    """The system's monotonic clock."""

    def monotonic_s(self) -> float:
        return time.monotonic()


def run(settings: Settings, config_source: ConfigSource | None = None) -> int:
    """Serve until told to stop; the process's exit code. `config_source` reads the configuration for a reload.

    0 stopped as asked · 1 could not start, the log says why and what to do · 70 a law was broken.

    For the main function of a process: the process may be replaced by itself, to get its memcpy tuned."""
    restart_tuned()
    gate = LevelGate(settings.server.log_level)
    log = make_log(gate, settings.server.log_format)
    handle_early_signals(log)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        runtime = RuntimeDir.claim(settings.server.runtime_dir)
    except HiCacheError as error:
        return _cannot_start(log, error)
    try:
        secret, tenants, store, arena = _lay_foundation(settings, log)
        try:
            builder = _Builder(settings, config_source, gate, log)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(builder.serve(runtime, secret, tenants, store, arena))
        finally:
            _close_arena(arena, log)
            if store is not None:
                store.close()
    except HiCacheError as error:
        return _cannot_start(log, error)
    finally:
        runtime.close()


def _cannot_start(log: Any, error: HiCacheError) -> int:
    log.error("daemon.cannot_start", code=error.code.value, reason=error.message, remedy=error.remedy)
    return EXIT_FAILURE


def _lay_foundation(settings: Settings, log: Any) -> tuple[bytes, Tenants, LmdbStore | None, Arena]:
    """What can fail for reasons of configuration or of the machine, the quick parts first.

    Raises `HiCacheError`; then nothing stays open."""
    l3_path = settings.l3.path if settings.l3.enabled else None
    tenants = Tenants.from_files({name: tenant.credential_file for name, tenant in settings.tenants.items()})
    secret = load_secret(settings.identity.secret_file, l3_path)
    store: LmdbStore | None = None
    if l3_path is not None:
        options = LmdbOptions(min_free_bytes=settings.l3.min_free, allow_unsafe_fs=settings.l3.allow_unsafe_fs)
        store = LmdbStore.open(l3_path / RECORDS_NAME, settings.l3.size, options, secret, log)
    try:
        threads = min(TOUCH_THREADS, len(os.sched_getaffinity(0)))
        arena = Arena.create(settings.l2.size, settings.l2.hugepages, threads, _Quarters(log))
    except BaseException:
        if store is not None:
            store.close()
        raise
    return secret, tenants, store, arena


class _Quarters:
    """Progress of the arena's first touch, a line per quarter: large ones take minutes. Called from any thread,
    one at a time."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._told = 0

    def __call__(self, ready: int, total: int) -> None:
        quarter = 4 * ready // total
        if quarter > self._told:
            self._told = quarter
            self._log.info("arena.touched", bytes=ready, of=total)


def _close_arena(arena: Arena, log: Any) -> None:
    """Unmap, unless a stuck thread still holds a view: then the end of the process does it."""
    gc.collect()  # the daemon's objects are a cycle, and hold views
    try:
        arena.close()
    except BufferError:
        log.warning("arena.still_viewed")


def _core_config(settings: Settings, store: LmdbStore | None) -> CoreConfig:
    parent, told = settings.l2.parent, settings.kv_events
    return CoreConfig(
        arena_bytes=settings.l2.size,
        parent_bytes=None if parent == "auto" else parent,
        l3_mode="off" if store is None else store.stats().mode,
        l3_capacity_bytes=0 if store is None else settings.l3.size,
        write_policy=settings.l3.write_policy,
        announced=Announced(frozenset(told.tenants), told.model) if told.enabled else None,
    )


def _kv_events(settings: Settings, runtime: RuntimeDir, state: CacheState, log: Any) -> KvEvents | None:
    told = settings.kv_events
    if not told.enabled:
        return None
    options = Options(
        endpoint=told.endpoint or f"ipc://{runtime.events}",
        replay_endpoint=told.replay_endpoint or f"ipc://{runtime.replay}",
        topic=told.topic,
        buffer_bytes=told.replay_buffer,
    )
    numbers = Numbers(runtime.numbers, log)
    return KvEvents(options, state, numbers, clock=MonotonicClock(), log=log)


class _Builder:
    """Builds and runs what needs the running loop. Lambdas close the circles: front ↔ loop ↔ lifecycle."""

    def __init__(self, settings: Settings, config_source: ConfigSource | None, gate: LevelGate, log: Any) -> None:
        self._settings = settings
        self._config_source = config_source
        self._gate = gate
        self._log = log

    async def serve(
        self, runtime: RuntimeDir, secret: bytes, tenants: Tenants, store: LmdbStore | None, arena: Arena
    ) -> int:
        settings, log, clock = self._settings, self._log, MonotonicClock()
        loop, limits = asyncio.get_running_loop(), settings.to_limits()
        limits = replace(limits, sessions=sessions_that_fit(raise_limit(), limits.sessions, log))
        boot_id = int.from_bytes(os.urandom(8), "little") or 1  # 0 means "none" on the wire
        life, sessions = Life(settings.server.drain), Sessions()
        front: Front
        describer: Describer
        daemon: Daemon
        inbox: Inbox[Note] = Inbox(loop, lambda note: cache.on_note(note))
        lane = CpuLane(arena.bytes, settings.l2.copy_threads, inbox.post)
        stores = None
        if store is not None:
            threads = StoreOptions(settings.l3.threads, limits.io_batch_pages, limits.pages_in_flight)
            stores = StoreThreads(store, arena.bytes, inbox.post, threads, clock=clock, log=log)
        cache = CacheLoop(
            state=CacheState(_core_config(settings, store), limits, secret),
            lanes=lane,
            stores=stores,
            clock=clock,
            post=inbox.post,
            recovered=lambda note: daemon.recovered(note),
            crash=lambda error: daemon.crash(error),
            log=log,
        )
        cache.kv_events = _kv_events(settings, runtime, cache.state, log)
        # After the lane has its threads, before ZeroMQ starts its own: an answer needs both the loop and those.
        favoured = favour_thread()
        server = Server(runtime.control, limits, lambda identity, frames: front.on_message(identity, frames), log)
        lifeline = Lifeline(
            runtime.lifeline,
            boot_id,
            limits,
            lambda session: cache.on_note(SessionClosed(SessionId(session), "the client died or hung up")),
            log,
        )
        front = Front(
            boot_id=boot_id,
            limits=limits,
            tenants=tenants,
            sessions=sessions,
            lifeline=lifeline,
            lanes=lane,
            send=server.send,
            feed=cache.feed,
            post=inbox.post,
            crash=cache.crash,
            phase=lambda: life.phase,
            describe=lambda what: describer(what),
            clock=clock,
            log=log,
        )
        cache.front = front
        gauge, notifier = LagGauge(loop, clock), Notifier.from_environment()
        watchdog = Watchdog(gauge, clock, log, lambda: notifier.send("WATCHDOG=1"))
        parts = Parts(cache, front, server, lifeline, lane, stores, gauge, watchdog, notifier, clock, log)
        reloader = self._reloader(life, store)
        describer = Describer(boot_id, parts, life, sessions, reloader.values, clock.monotonic_s())
        daemon = Daemon(parts, life, reloader.reload)
        log.info(
            "daemon.starting",
            runtime_dir=str(runtime.path),
            boot=f"{boot_id:016x}",
            l2_bytes=settings.l2.size,
            loop_favoured=favoured,
        )
        return await daemon.run()

    def _reloader(self, life: Life, store: LmdbStore | None) -> Reloader:
        def set_level(level: str) -> None:
            self._gate.level = level

        def set_drain(seconds: float) -> None:
            life.drain_s = seconds

        appliers: dict[str, Callable[[Any], None]] = {"server.log_level": set_level, "server.drain": set_drain}
        if store is not None:
            appliers["l3.min_free"] = store.set_min_free
        return Reloader(self._settings, self._config_source, appliers, self._log)
