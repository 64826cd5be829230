"""The meeting of the processes of a job in a shared store.

Processes of one host meet in a file that no other user can open, and gloo listens on loopback. Processes of several hosts
meet in the TCP store of torch, which serves everyone who reaches its port; what ranks must not share with others is never in
it (`job_key`). The store and gloo listen in the network of the job only.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from pipepart.devices import backend_for, local_device
from pipepart.errors import ConfigError
from pipepart.runtime.addresses import address_towards, check_host, interface_of, is_here, is_loopback, listen
from pipepart.runtime.port_store import reached_store, store_on_this_host
from pipepart.runtime.silence import end_when_silent
from pipepart.runtime.strangers import closed_to_strangers
from pipepart.values import shortened

__all__ = [
    "TOKEN",
    "job_folder",
    "job_store",
    "join_job",
    "leave_environment",
    "limit_silence",
    "listen_locally",
    "locally",
    "meeting_store",
    "name_job",
    "processes_on_this_host",
    "served_store",
    "token_digest",
    "world_size",
]

_FOLDER = "PIPEPART_JOB"
"""The variable with the private folder in which the processes of a job on one host meet."""
TOKEN = "PIPEPART_TOKEN"
"""The variable with a secret of the user, equal on all hosts of a job. It is never sent."""
_FILE = "store"
_GLOO = "GLOO_SOCKET_IFNAME"
_INTERFACES = (_GLOO, "NCCL_SOCKET_IFNAME")
_chosen: dict[str, str] = {}
"""The variables of interfaces that this process has set for its job."""
_opened: dict[str, dist.Store] = {}
_between: dict[tuple[str, int], tuple[str, dist.Store]] = {}
"""The stores between hosts that this process has opened, by address and port, with the address that has answered."""
_address: list[str] = []
"""The address of this host in the network of the job, if it is on several hosts."""
_GRACE = 5.0  # seconds
_jobs = ExitStack()
atexit.register(_jobs.close)


def join_job(timeout: timedelta, wanted: str | torch.device | None = None) -> torch.device:
    """Initialise `torch.distributed` from the variables of torchrun, if needed. Returns the device of this rank."""
    device = local_device(int(os.environ.get("LOCAL_RANK", "0")), wanted)
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
        one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
        store = meeting_store(address, port, rank, size, timeout, one_host)
        with closed_to_strangers():
            dist.init_process_group(backend_for(device), store=store, rank=rank, world_size=size, timeout=timeout)
    return device


def world_size() -> int:
    """Return the number of processes of this job."""
    return dist.get_world_size() if dist.is_initialized() else 1


def processes_on_this_host() -> int:
    """Return the number of processes of this job that run on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def job_store() -> dist.Store:
    """Return the key-value store that all ranks of the job share."""
    return dist.distributed_c10d._get_default_store()


@contextmanager
def job_folder() -> Iterator[str]:
    """Make a private folder for a job on this host. The processes that are started inside meet in it."""
    made, before, maker = _private_folder(), os.environ.get(_FOLDER), os.getpid()
    os.environ[_FOLDER] = made
    try:
        yield made
    finally:
        _remove(made, maker)
        os.environ.pop(_FOLDER, None)
        if before is not None:
            os.environ[_FOLDER] = before


def name_job(nodes: int) -> None:
    """Prepare a job whose other processes this process is about to start: on one host they meet in a private folder.

    So two jobs never meet, even if they were told the same port.
    """
    os.environ.pop(_FOLDER, None)  # the folder of an enclosing job
    if nodes == 1:
        _jobs.enter_context(job_folder())


def meeting_store(
    address: str, port: int, rank: int, size: int, timeout: timedelta, one_host: bool = False
) -> dist.Store:
    """Return the store in which the processes of a job meet. All ranks must call it.

    A job is on this host if its launcher says so or its main address is loopback. There, nothing listens that serves
    another user: neither a store of torch, which listens on every address of the host, nor gloo and NCCL, which listen on
    the address of the host name unless an interface is set. In a job on several hosts the store listens on the main address
    only, and gloo on the interface that leads there. Interfaces that the user has set are kept.
    """
    elastic = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the agent of torchrun has made a store
    folder = None if elastic else _job_around()
    if not (folder or one_host or size == 1 or is_loopback(address)):
        return _store_between_hosts(address, port, rank, size, timeout, elastic)
    if interface := _loopback_interface():
        _chosen.update({name: interface for name in _INTERFACES if name not in os.environ})
        listen_locally()
    if size == 1:
        return dist.HashStore()
    if folder is None:
        first = _first_store(address, port, rank, timeout, elastic)
        return _moved(first, rank, size, timeout)
    store = _file_store(folder)
    _arrive(store, folder, rank, size, timeout)
    return _numbered(store, rank)


def listen_locally() -> None:
    """Set the interfaces of a job, as `meeting_store` has chosen them. NCCL reads them at its first use."""
    for name, interface in _chosen.items():
        os.environ.setdefault(name, interface)


def leave_environment() -> None:
    """Remove the interfaces that were set for a job; those of the user stay."""
    for name, interface in _chosen.items():
        if os.environ.get(name) == interface:
            del os.environ[name]


@contextmanager
def locally() -> Iterator[None]:
    """Inside, groups are made on the interfaces of the job. Afterwards the environment is as before."""
    absent = [name for name in _chosen if name not in os.environ]
    listen_locally()
    try:
        yield
    finally:
        for name in absent:
            os.environ.pop(name, None)


def _job_around() -> str | None:
    """Return the folder of the job of this process; None without one.

    A folder that this process has not opened and that no longer exists belongs to another job, which has met and removed it.
    """
    folder = os.environ.get(_FOLDER)
    return folder if folder and (folder in _opened or os.path.isdir(folder)) else None


def _source_of_address() -> str:
    if "SLURM_JOB_ID" in os.environ:
        return "MASTER_ADDR or, if the queue has set that, from the list of nodes of SLURM (SLURM_JOB_NODELIST)"
    return "MASTER_ADDR"


def _private_folder() -> str:
    """Make a folder that only this user can enter, in memory if possible: a full disk must not stop the job."""
    memory = "/dev/shm"
    return tempfile.mkdtemp(
        prefix=f"pipepart-job-{os.getpid()}-", dir=memory if os.access(memory, os.W_OK | os.X_OK) else None
    )


def _file_store(folder: str) -> dist.Store:
    """Open the store in a private folder, which must belong to this user and be closed to all others.

    On Linux the store is used by its descriptor, so that the folder can be removed as soon as all ranks have opened it, and
    a job leaves nothing behind.
    """
    if folder in _opened:
        return _opened[folder]
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(place)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(
                f"the folder {folder}, in which the processes of this job meet, is not private to user {os.geteuid()}; "
                "expected this user as its owner, and no access for others. "
                f"Start the job again, without {_FOLDER} if you have set it."
            )
        file = os.open(_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=place)
    finally:
        os.close(place)
    path = f"/proc/self/fd/{file}"
    if not os.path.exists(path):
        os.close(file)
        path = os.path.join(folder, _FILE)
    _opened[folder] = dist.FileStore(path)
    return _opened[folder]


def _arrive(store: dist.Store, folder: str, rank: int, size: int, timeout: timedelta) -> None:
    """Announce that this rank has opened the store. When all have, rank 0 removes the file and, if empty, its folder."""
    store.set_timeout(timeout)
    if store.add("arrived", 1) == size:
        store.set("all arrived", "")
    if rank == 0:
        store.wait(["all arrived"])
        if os.path.exists("/proc/self/fd"):
            with suppress(OSError):
                os.unlink(os.path.join(folder, _FILE))
                os.rmdir(folder)


def _numbered(store: dist.Store, rank: int) -> dist.Store:
    """Return a part of the store for this initialisation of `torch.distributed`; a process may repeat it."""
    return dist.PrefixStore(str(store.add(f"joined/{rank}", 1)), store)


def _first_store(address: str, port: int, rank: int, timeout: timedelta, elastic: bool) -> dist.Store:
    """Return a TCP store on this host in which ranks without a common folder find each other."""
    if elastic:
        store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
        return dist.PrefixStore(f"pipepart/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store_on_this_host(port, rank, timeout)


def _moved(first: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Move from a store on a port to a file in a private folder of rank 0, which every rank checks.

    Only the name of the folder is read from the port, and other users could have written it: rank 0 uses the folder that it
    has made itself. Ranks in containers with separate folders stay in the first store, with PIPEPART_TOKEN only.
    """
    first = _numbered(first, rank)
    if rank == 0:
        folder = _private_folder()
        _jobs.callback(_remove, folder, os.getpid())
        first.set("folder", folder)
    else:
        folder = first.get("folder").decode(errors="replace")
    store = None
    with suppress(OSError, ValueError):
        store = _file_store(folder)
    first.set(f"opened/{rank}", "no" if store is None else "yes")
    without = [other for other in range(size) if first.get(f"opened/{other}") != b"yes"]
    if store is not None and not without:
        _arrive(store, folder, rank, size, timeout)
        return store
    if rank == 0:
        _remove(folder, os.getpid())
    if not os.environ.get(TOKEN):
        raise ConfigError(
            f"the ranks of this job have no private folder in common: rank {', '.join(map(str, without)) or rank} cannot open "
            f"{shortened(folder)} of rank 0. Without it, other users of this host could write to the store in which the ranks "
            f"meet. If the ranks run in containers with separate file systems, set {TOKEN} to one secret in all of them."
        )
    return first


def _remove(folder: str, maker: int) -> None:
    if os.getpid() == maker:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)


def _store_between_hosts(
    address: str, port: int, rank: int, size: int, timeout: timedelta, elastic: bool
) -> dist.Store:
    """Return the TCP store of a job on several hosts, with the token of the job in the names of all keys, if there is one."""
    source = _source_of_address()
    addresses = check_host(address, source)
    if (address, port) not in _between:
        if rank == 0 and not elastic:
            place = next(filter(is_here, addresses), addresses[0])
            _between[address, port] = place, served_store(address, port, timeout, source)
        else:
            _between[address, port] = reached_store(addresses, port, timeout, source)
    place, common = _between[address, port]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = _numbered(dist.PrefixStore(f"pipepart/{token_digest()}/{attempt}", common), rank)
    own = _address_between(store, place, rank, size)
    _address[:] = [] if own is None else [own]
    limit_silence(timeout.total_seconds())
    interface = None if own is None else interface_of(own)
    if interface and _GLOO not in os.environ:  # NCCL chooses among the networks of several hosts itself
        _chosen[_GLOO] = interface
        listen_locally()
    return store


def limit_silence(seconds: float) -> None:
    """Let connections to other hosts of the job end after `seconds` of silence, since a host may be cut off.

    It is called whenever connections have been made. The timeout of transfers, which knows more, ends first.
    """
    for address in _address:
        end_when_silent(address, seconds + _GRACE)


def served_store(name: str, port: int, timeout: timedelta, source: str) -> dist.Store:
    """Return a TCP store of torch that this process serves, on one address of this host only.

    On some systems the name of a host is an address of loopback for the host itself. Others reach it by an address that is
    not known here: then the store listens on all addresses. So it does behind a translated address, which no interface has.
    """
    addresses = check_host(name, source)
    known = [address for address in addresses if is_here(address) and (is_loopback(name) or not is_loopback(address))]
    everywhere = "::" if any(":" in address for address in addresses) else "0.0.0.0"
    try:
        listener = listen(known or [everywhere], port)
    except OSError as error:
        raise ConfigError(
            f"{socket.gethostname()} cannot listen on {(known or addresses)[0]} port {port}, where the processes of this job "
            f"meet: {error}. The address comes from {source}. Another job or program may use the port: choose another one."
        ) from error
    return dist.TCPStore(
        known[0] if known else "localhost", port, None, True, timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def _address_between(store: dist.Store, place: str, rank: int, size: int) -> str | None:
    """Return the address of this host in the network of a job on several hosts. All ranks must call it.

    `place` is the main address as this host sees it. If that is loopback, the ranks of other hosts tell the address by which
    they have reached it; if there are none, the job is on this host.
    """
    store.set(f"reached/{rank}", "" if is_loopback(place) else place)
    if is_loopback(place):
        told = (store.get(f"reached/{other}").decode(errors="replace") for other in range(size))
        place = next(filter(None, told), place)
    return place if is_here(place) else address_towards(place)


def token_digest() -> str:
    """Return the digest of PIPEPART_TOKEN, which is part of the names of keys in a store; empty without a token."""
    token = os.environ.get(TOKEN)
    return hashlib.sha256(token.encode()).hexdigest() if token else ""


def _loopback_interface() -> str | None:
    with suppress(OSError):
        names = {name for _, name in socket.if_nameindex()}
        return next((name for name in ("lo", "lo0") if name in names), None)
    return None
