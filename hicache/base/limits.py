"""Every bound in one place. `Welcome` tells a client those that concern it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Hard bounds. Reaching one is a typed error or `Busy`, never a growing queue."""

    sessions: int = 1024
    requests_in_flight: int = 64  # credits: open requests per session
    leases_per_session: int = 4096
    tokens_per_request: int = 4 * 1024 * 1024
    body_bytes: int = 1 * 1024 * 1024  # the MessagePack body of one message
    buffer_bytes: int = 32 * 1024 * 1024  # one raw buffer frame
    buffers: int = 17  # raw buffer frames per message: tokens and one per group
    groups: int = 16
    layers: int = 1024
    pool_bytes: int = 1 << 46
    fence_slots: int = 4096
    scope_bytes: int = 64 * 1024  # salt, LoRA and multimodal identity of one request
    lease_ttl_s: float = 60.0  # without renewal
    session_silence_s: float = 30.0  # without any message: SUSPECT
    drain_s: float = 20.0
    tree_tokens: int = 1 << 31  # token ids held by all trees
    io_batch_pages: int = 128  # pages per L3 batch
    pages_in_flight: int = 65536  # pages owned by open tickets, all sessions together
