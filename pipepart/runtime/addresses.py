"""Addresses of this host: whose an address is, which interface has it, and whether another host can be reached.

A host has several addresses, and its name often belongs to another one than the network of a job, or to loopback. So nothing
here asks for the name of this host: an address is that of this host if a socket can be bound to it.
"""

from __future__ import annotations

import errno
import ipaddress
import random
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress

from pipepart.errors import ConfigError, PipelineError
from pipepart.machine.ports import JOB_PORTS

__all__ = [
    "address_towards",
    "check_host",
    "free_port",
    "interface_of",
    "is_here",
    "is_loopback",
    "listen",
    "reach",
    "resolved",
]

_RESOLVE = 5.0  # seconds in which the name of a host must resolve
_REACH = 10.0  # seconds in which a host must be reached
_TRY = 3.0  # seconds of one attempt to connect
_PAUSE = 0.2  # seconds between two attempts
_NOTE = 5.0  # seconds after which a wait is said
_BACKLOG = 1024


def check_host(name: str, source: str) -> list[str]:
    """Return the addresses of the host where a job meets, or raise an error; torch would try until its timeout."""
    deadline = time.monotonic() + _RESOLVE  # a name may appear only when its host has started
    while True:
        try:
            return resolved(name)
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"the processes of this job meet on the host {name!r}, and this name does not resolve on "
                    f"{socket.gethostname()}: {error}. The name comes from {source}. Set it to an address that all hosts "
                    "of the job can reach, or add the name to DNS or /etc/hosts."
                ) from error
            time.sleep(0.5)


def resolved(name: str) -> list[str]:
    """Return the addresses of a host by its name or address, in the order in which they are to be tried."""
    return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))


def is_loopback(address: str) -> bool:
    """Return whether an address (not a name, except `localhost`) reaches this host only."""
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def is_here(address: str) -> bool:
    """Return whether this host has an address."""
    with suppress(OSError), closing(socket.socket(_family(address), socket.SOCK_DGRAM)) as probe:
        probe.bind((address, 0))
        return True
    return False


def address_towards(address: str) -> str | None:
    """Return the address of this host from which it reaches another one. Nothing is sent."""
    with suppress(OSError), closing(socket.socket(_family(address), socket.SOCK_DGRAM)) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """Return the network interface of this host that has an address (Linux only)."""
    with suppress(OSError, ValueError, ImportError):
        wanted = ipaddress.ip_address(address)
        return next((name for name, found in _interfaces(wanted.version) if found == wanted.packed), None)
    return None


def listen(addresses: Iterable[str], port: int) -> socket.socket:
    """Return a socket that listens on a port of the first of these addresses that this host has; raise OSError if none."""
    failed: OSError = OSError(errno.EADDRNOTAVAIL, "this host has none of the addresses")
    for address in addresses:
        listener = socket.socket(_family(address))
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(_BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            failed = error
    raise failed


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of an address of this host that nobody listens on, for a process that starts later.

    A port that the system chooses may belong to a connection of any program before that process has bound it.
    """
    for port in random.SystemRandom().sample(JOB_PORTS, len(JOB_PORTS)):
        with suppress(OSError), closing(socket.socket(_family(address))) as probe:
            probe.bind((address, port))
            return port
    first, last = JOB_PORTS[0], JOB_PORTS[-1]
    raise PipelineError(f"every port of {address} from {first} to {last} is in use on {socket.gethostname()}")


def reach(
    addresses: list[str],
    port: int,
    wait: float,
    source: str,
    note: Callable[[str], None] | None = None,
    check: Callable[[], None] | None = None,
) -> str:
    """Wait until a port of one of these addresses accepts connections, and return that address.

    A host that refuses connections is there, and its program may start later: it is waited for. A host that does not answer
    at all, or to which there is no way, is an error after a few seconds. `note` is told once that a wait takes longer. `check`
    is called meanwhile and may raise.
    """
    here, begun, answered, noted = socket.gethostname(), time.monotonic(), False, False
    while True:
        for address in addresses:
            try:
                with socket.create_connection((address, port), timeout=_TRY):
                    return address
            except ConnectionRefusedError as error:
                answered, last = True, error
            except OSError as error:
                last = error  # type: ignore[assignment]
        if check is not None:
            check()
        passed = time.monotonic() - begun
        where = f"{', '.join(addresses)} port {port}"
        if not answered and passed > min(_REACH, wait):
            raise PipelineError(
                f"{here} cannot reach the host where the processes of this job meet: {where}: {last}. The address comes from "
                f"{source}. Expected an address of one of the hosts of this job, in a network that all of them share. Check "
                "the address, the cable or route to it, and firewalls between the hosts."
            )
        if passed > wait:
            raise PipelineError(
                f"nothing listens at {where}, where the processes of this job meet, and {here} has waited for {wait:.0f} s: "
                f"{last}. The address comes from {source}. Expected that the job is started on the host with this address, "
                "too, and that the address is one of its own interfaces (not one that a router translates)."
            )
        if note is not None and answered and not noted and passed > _NOTE:
            noted = True
            note(f"waiting for the host with the address {where} to start its part of the job (at most {wait:.0f} s)")
        time.sleep(_PAUSE)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _interfaces(version: int) -> list[tuple[str, bytes]]:
    """Return the names of interfaces with their addresses, as bytes."""
    if version == 6:
        with open("/proc/net/if_inet6") as table:
            rows = [line.split() for line in table]
        return [(row[5], bytes.fromhex(row[0])) for row in rows]
    import array
    import fcntl

    get_table, row_size = 0x8912, 40 if struct.calcsize("P") == 8 else 32  # SIOCGIFCONF, the size of an ifreq
    room = array.array("B", bytes(row_size * 1024))
    place, length = room.buffer_info()
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        answer = fcntl.ioctl(probe.fileno(), get_table, struct.pack("iP", length, place))
    used = room.tobytes()[: struct.unpack("iP", answer)[0]]
    rows_ = [used[at : at + row_size] for at in range(0, len(used), row_size)]
    return [(row[:16].split(b"\0")[0].decode().partition(":")[0], row[20:24]) for row in rows_]
