"""What a session has open, owned apart from it, so that it is closed in order whatever becomes of the session.

A client that is dropped inside a reference cycle goes with its sockets in one sweep of the garbage collector,
in any order; a context that goes before its socket waits for it for ever. So a finalizer of the session owns
context and sockets: they are no garbage before it has run, and it closes the socket first.

Nothing here may refer to the session, nor to what waits for it (a task does), or neither would ever be garbage.
"""

import os
from collections.abc import Callable

import zmq

from hicache_client.lifeline import Lifeline

Alone = Callable[[Callable[[], None]], None]  # runs an action when no call is at the sockets, now or soon


class Sockets:
    """At most one lifeline and one DEALER at a time; those that were here before have been closed."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.lifeline: Lifeline | None = None
        self.dealer: zmq.Socket[bytes] | None = None
        self._process = os.getpid()

    @property
    def ours(self) -> bool:
        """False in a process forked from the one that opened them: to use or close them would harm the parent."""
        return os.getpid() == self._process

    def close(self) -> None:
        """Hang up, drop what is unsent, end the context. Idempotent; does not wait for the daemon."""
        if self.lifeline is not None:
            self.lifeline.close()
        if self.dealer is not None:
            self.dealer.close(0)
        self.context.destroy(0)


def hang_up(sockets: Sockets, alone: Alone) -> None:
    """A session's finalizer; the garbage collector runs it on any thread, at any line."""
    if sockets.ours:
        alone(sockets.close)
