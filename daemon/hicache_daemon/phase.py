"""The daemon's life.

STARTING ─sockets open─► RECOVERING ─rows of L3 known─► READY ─SIGTERM─► DRAINING ─idle or late─► STOPPED
    └────────────┴── SIGTERM ──┴──────────────────────────────────────────────────────────────────►┘
"""

from enum import StrEnum


class Phase(StrEnum):
    STARTING = "starting"
    RECOVERING = "recovering"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
