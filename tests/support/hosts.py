"""Hosts on one machine: network namespaces with addresses, names, clocks and processes of their own, linked by cables.

```
    h1 (10.77.0.1) ---cable---+
                              |
    h2 (10.77.0.2) ---cable---+--- switch (a bridge in a namespace of its own)
                              |
    h3 (10.77.0.3) ---cable---+
```

A host is a process that owns its namespaces, and the first process in them. It ends when the pipe from the process that made
it is closed, so also when that process is killed; the kernel then ends everything that runs on the host, and removes its
interfaces. Nothing is made in the namespaces of the machine itself: there are no names to choose, and nothing to clean up.
The module does not need pytest, so that benches can use it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

__all__ = ["Host", "made_hosts", "why_no_hosts"]

_PROGRAMS = ("ip", "tc", "unshare", "nsenter", "mount")
_PATIENCE = 60  # seconds in which a host is made
_BURST = "64kb"  # bytes that a rate-limited cable takes at once
_LATENCY = "200ms"  # the longest time that a message waits at a rate-limited cable before it is dropped


class Host:
    """One host. `start` starts a program on it."""

    def __init__(self, name: str, addresses: Sequence[str], keeper: subprocess.Popen[str]) -> None:
        self.name, self.addresses, self._keeper = name, tuple(addresses), keeper
        self.process = _first_process(keeper)
        """The number of the first process of the host, as this process sees it."""
        self._cables: list[tuple[Host, str]] = []
        """The switch and the name of its end, for each cable of this host."""
        self._started: list[subprocess.Popen[Any]] = []

    @property
    def address(self) -> str:
        """The address of this host in the first network."""
        return self.addresses[0]

    def start(
        self,
        words: Sequence[str],
        folder: str | os.PathLike[str] = ".",
        environment: Mapping[str, str] | None = None,
        output: int | IO[Any] = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start a program on this host, with its errors in its output."""
        started = subprocess.Popen(
            ["nsenter", "--target", self.process, "--all", f"--wdns={os.path.abspath(folder)}", "--", *words],
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self._started.append(started)
        return started

    def run(self, *words: str) -> str:
        """Run a short program on this host and return what it prints."""
        return self._ran(["--all"], words)

    def set_up(self, program: str, lines: Sequence[str]) -> None:
        """Run lines of `ip` or `tc` of this machine in the network of this host."""
        self._ran(["--net"], [program, "-batch", "-"], "".join(f"{line}\n" for line in lines))

    def _ran(self, spaces: list[str], words: Sequence[str], text: str = "") -> str:
        enter = ["nsenter", "--target", self.process, *spaces, "--"]
        done = subprocess.run([*enter, *words], input=text, capture_output=True, text=True, timeout=_PATIENCE)
        if done.returncode:
            said = done.stderr.strip() or done.stdout.strip()
            raise RuntimeError(f"{' '.join(words)} failed on {self.name}: {said}")
        return done.stdout

    def cut(self) -> None:
        """Cut the cables of this host. Nothing arrives any more, and nobody is told."""
        for switch, end in self._cables:
            switch.set_up("ip", [f"link set {end} down"])

    def mend(self) -> None:
        """Connect the cables of this host again."""
        for switch, end in self._cables:
            switch.set_up("ip", [f"link set {end} up"])

    def end(self) -> None:
        """End the host with all of its processes."""
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        self._keeper.kill()  # and with it, the first process of the host
        self._keeper.wait(_PATIENCE)
        self._keeper.stdin.close()
        self._keeper.stdout.close()
        for started in self._started:
            started.wait(_PATIENCE)
            if started.stdout is not None:
                started.stdout.close()


@cache
def why_no_hosts() -> str | None:
    """Return the reason why this system cannot make hosts; None if it can."""
    if not hasattr(os, "geteuid") or not os.path.exists("/proc/self/ns/net"):
        return "hosts are namespaces of Linux"
    if os.geteuid() != 0:
        return "only root can make hosts"
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"hosts need the program {missing[0]!r}"
    try:
        with made_hosts(1, rate="1gbit"):
            return None
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return f"this system does not allow hosts: {error}"


@contextmanager
def made_hosts(
    count: int,
    networks: Sequence[str] = ("10.77.0",),
    rate: str | None = None,
    named: bool = False,
    clocks: Sequence[int] = (),
    disk: Path | None = None,
) -> Iterator[list[Host]]:
    """Make hosts, and end them with all of their processes afterwards.

    Their names are h1, h2, ..., and their addresses in each of the `networks` end in 1, 2, ... The interfaces are net0, net1,
    ... in the order of the networks. `rate` limits each direction of each cable, in the words of `tc` ("100mbit"). A host
    knows its own name as an address of loopback, as Debian sets it up; with `named`, it knows those of the other hosts, too,
    by their addresses in the first network. `clocks` are seconds by which the monotonic clock of each host is ahead. With
    `disk`, each host has a disk of its own at this path; from outside, it is the folder with the name of the host in it.
    """
    names = [f"h{number + 1}" for number in range(count)]
    known = {name: f"{networks[0]}.{number + 1}" for number, name in enumerate(names)} if named else {}
    with ExitStack() as ends:
        switch = Host("the switch", [], _kept("switch", {}, 0, None))
        ends.callback(switch.end)
        bridges = [f"bridge{number}" for number in range(len(networks))]
        switch.set_up(
            "ip", [line for name in bridges for line in (f"link add {name} type bridge", f"link set {name} up")]
        )
        made = []
        for number, name in enumerate(names):
            addresses = [f"{network}.{number + 1}" for network in networks]
            host = Host(name, addresses, _kept(name, known, clocks[number] if clocks else 0, disk))
            ends.callback(host.end)
            _connect(switch, host, rate)
            made.append(host)
        yield made


def _kept(name: str, known: Mapping[str, str], clock: int, disk: Path | None) -> subprocess.Popen[str]:
    """Start the first process of a host: it prepares the host, says so, and waits for the end of its input."""
    lines = ["127.0.0.1 localhost", f"127.0.1.1 {name}"]
    lines += [f"{address} {other}" for other, address in known.items() if other != name]
    steps = [
        f"hostname {name}",
        "ip link set lo up",
        "mount -t tmpfs host /dev/shm",
        f"printf '{'|'.join(lines)}|' | tr '|' '\\n' > /dev/shm/.hosts",
        "mount --bind /dev/shm/.hosts /etc/hosts",
    ]
    if disk is not None:
        (disk / name).mkdir(parents=True, exist_ok=True)
        steps.append(f"mount --bind '{disk / name}' '{disk}'")
    spaces = ["--net", "--uts", "--pid", "--mount", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    spaces += ["--time", "--monotonic", str(clock)] if clock else []
    keeper = subprocess.Popen(
        ["unshare", *spaces, "sh", "-ec", f"{' && '.join(steps)} && echo ready && exec cat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert keeper.stdout is not None
    said = keeper.stdout.readline()
    if said.strip() != "ready":
        keeper.kill()
        raise RuntimeError(f"the host {name} could not be made: {said.strip()} {keeper.stdout.read().strip()}")
    return keeper


def _first_process(keeper: subprocess.Popen[str]) -> str:
    return Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()[0]


def _connect(switch: Host, host: Host, rate: str | None) -> None:
    """Put a cable between a host and the switch of each network."""
    ends = [f"{host.name}-{number}" for number in range(len(host.addresses))]
    there, here = list[str](), list[str]()
    for number, (end, address) in enumerate(zip(ends, host.addresses)):
        there += [f"link add {end} type veth peer name net{number} netns {host.process}"]
        there += [f"link set {end} master bridge{number} up"]
        here += [f"address add {address}/24 dev net{number}", f"link set net{number} up"]
        host._cables.append((switch, end))
    switch.set_up("ip", there)
    host.set_up("ip", here)
    if rate:
        limit = f"root tbf rate {rate} burst {_BURST} latency {_LATENCY}"
        switch.set_up("tc", [f"qdisc add dev {end} {limit}" for end in ends])
        host.set_up("tc", [f"qdisc add dev net{number} {limit}" for number in range(len(ends))])
