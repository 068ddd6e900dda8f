"""sd_notify without a library: one datagram per message to the socket that systemd names in the environment."""

import os
import socket


class Notifier:
    """Tells a service manager READY=1, STOPPING=1, STATUS=… and WATCHDOG=1; without one it does nothing."""

    def __init__(self, address: str | None) -> None:
        """`address` is $NOTIFY_SOCKET: a path, or an abstract name that begins with "@"."""
        self._address = address

    @classmethod
    def from_environment(cls) -> "Notifier":
        return cls(os.environ.get("NOTIFY_SOCKET"))

    def send(self, text: str) -> bool:
        """Send `KEY=value` lines. False if there is no manager or it does not listen: never an error of ours."""
        if not self._address:
            return False
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                sock.sendto(text.encode(), address)
        except OSError:
            return False
        return True
