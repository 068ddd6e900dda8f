"""A lease as it travels between processes of one engine: the scheduler takes it, the workers load on it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeaseRef:
    """The daemon's own number of a lease, and the boot of the daemon that gave it: of another boot it means
    nothing. Only sessions of the same tenant and engine group may use it."""

    boot_id: int
    lease: int
