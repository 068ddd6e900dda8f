"""Answers to Describe: maps of JSON-able values, `schema_version` first.

Ids of 64 bits are hex strings: JSON readers that use doubles would round them. No secret, credential, token or
full instance id is ever in an answer.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from hicache_daemon.lifecycle import Life, Parts
from hicache_daemon.phase import Phase
from hicache_daemon.sessions import Session, Sessions
from hicache_daemon.stores import STUCK_S

SCHEMA_VERSION = 1
LAG_ALARM_MS = 1000.0


@dataclass(slots=True)
class Describer:
    """`describer("status")` and so on; reads, never changes."""

    boot_id: int
    parts: Parts
    life: Life
    sessions: Sessions
    config_values: Callable[[], dict[str, Any]]
    started_s: float

    def __call__(self, what: str) -> dict[str, Any]:
        """Raises `KeyError` for a part that the protocol does not name."""
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "status": self._status,
            "config": lambda: {"values": self.config_values()},
            "l2": self._l2,
            "l3": self._l3,
            "sessions": self._sessions,
        }
        return {"schema_version": SCHEMA_VERSION, "boot_id": f"{self.boot_id:016x}"} | parts[what]()

    def readiness(self) -> tuple[bool, list[str]]:
        """(ready, reasons). Ready means that sessions are accepted; reasons also name what is degraded."""
        life, parts = self.life, self.parts
        reasons = [] if life.phase is Phase.READY else [f"the daemon is {life.phase}"]
        if life.recovery_error:
            reasons.append(f"l3: not all records were recovered: {life.recovery_error}")
        if parts.stores is not None:
            stats = parts.stores.status()
            if stats["mode"] != "rw":
                reasons.append(f"l3 is {stats['mode']}: {stats['reason'] or 'no reason given'}")
            if parts.stores.stuck_s() > STUCK_S:
                reasons.append(f"l3: a call has not returned for {parts.stores.stuck_s():.0f} s")
        if parts.gauge.lag_ms()["p99"] > LAG_ALARM_MS:
            reasons.append(f"the loop lags: p99 {parts.gauge.lag_ms()['p99']:.0f} ms in the last minute")
        return life.phase is Phase.READY, reasons

    def _status(self) -> dict[str, Any]:
        ready, reasons = self.readiness()
        parts, cache = self.parts, self.parts.cache.state.snapshot()
        routers = parts.cache.kv_events
        return {
            "state": str(self.life.phase),
            "ready": ready,
            "reasons": reasons,
            "version": version("hicache"),
            "pid": os.getpid(),
            "uptime_s": round(parts.clock.monotonic_s() - self.started_s, 1),
            "loop_lag_ms": parts.gauge.lag_ms(),
            "loop_hangs": parts.watchdog.hangs,
            "sessions": len(self.sessions),
            "lifelines": parts.lifeline.counts(),
            "recovered_rows": self.life.recovered_rows,
            "front": dict(parts.front.counters),
            "loop": dict(parts.cache.counters),
            "kv_events": {"enabled": False} if routers is None else routers.status(),
            "cache": {name: cache[name] for name in ("pool", "rows", "l3", "leases", "tickets", "counters")},
        }

    def _l2(self) -> dict[str, Any]:
        cache = self.parts.cache.state.snapshot()
        shown = ("pool", "rows", "tree_tokens", "leases", "tickets", "tenants", "namespaces")
        return {name: cache[name] for name in shown} | {"copies": asdict(self.parts.lanes.stats())}

    def _l3(self) -> dict[str, Any]:
        cache, stores = self.parts.cache.state.snapshot()["l3"], self.parts.stores
        if stores is None:
            return {"mode": "off", "reason": "l3.enabled is false"}
        return stores.status() | {"write_policy": cache["write_policy"], "indexed_bytes": cache["used_bytes"]}

    def _sessions(self) -> dict[str, Any]:
        now_s = self.parts.clock.monotonic_s()
        inside = {each["session"]: each for each in self.parts.cache.state.snapshot()["sessions"]}
        return {"sessions": [_session(session, inside.get(session.id, {}), now_s) for session in self.sessions]}


def _session(session: Session, inside: dict[str, Any], now_s: float) -> dict[str, Any]:
    """One session: what the edge knows, then what the cache state knows. Only the head of the instance id: who
    has all of it can end the session."""
    edge = {
        "session": session.id,
        "engine": session.engine,
        "model": session.model,
        "tenant": session.tenant,
        "pid": session.pid,
        "instance": session.instance[:4].hex(),
        "epoch": session.epoch,
        "group": session.group[:4].hex(),
        "memory": session.memory,
        "age_s": round(now_s - session.opened_s, 1),
        "heard_s": round(now_s - session.heard_s, 1),
        "requests": session.requests,
        "open_requests": len(session.open),
    }
    return edge | {name: inside.get(name) for name in ("state", "leases", "tickets", "page_tokens", "page_bytes")}
