"""The key of a job: how its ranks agree on it, and how they prove it to each other.

On one host the key is in the private store of the job. The store of a job on several hosts serves everyone who reaches its
port, so the key is never in it: each rank publishes a number, and rank 0 seals the key for each of them (the key exchange of
Diffie and Hellman in group 14 of RFC 3526). Who reads the store learns nothing. Who also writes to it while ranks meet could
take part; PIPEPART_TOKEN excludes that, since it is a part of each seal.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from typing import Any

import torch
import torch.distributed as dist

from pipepart.errors import PipelineError
from pipepart.runtime.rendezvous import TOKEN, job_store

__all__ = ["agreed_key", "job_key", "prove"]

_BYTES = 32
_PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E3404DDEF9519B3CD3A431B302B0A6D"
    "F25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7EDEE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3D"
    "C2007CB8A163BF0598DA48361C55D39A69163FA8FD24CF5F83655D23DCA3AD961C62F356208552BB9ED529077096966D670C354E4ABC9804F1746C08"
    "CA18217C32905E462E36CE3BE39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6955817183995497CEA956AE515D2261898FA0510"
    "15728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
_BASE = 2


def job_key(number: int) -> bytes:
    """Return a random key of the job, equal on all ranks, for its set of groups with this number. All ranks must call it.

    With it, ranks sign the objects that they send to each other.
    """
    store = job_store()
    if _is_private(store):
        found = store.compare_set("pipepart/key", "", os.urandom(16).hex())
        return hashlib.sha256(os.environ.get(TOKEN, "").encode() + found).digest()
    inner = dist.PrefixStore(f"pipepart/key/{number}", store)
    return agreed_key(inner, dist.get_rank(), dist.get_world_size(), os.environ.get(TOKEN, ""))


def agreed_key(store: dist.Store, rank: int, size: int, token: str) -> bytes:
    """Agree on a random key through a store that others can read. All ranks must call it."""
    own = 1 + secrets.randbelow(2**256)
    public = f"{pow(_BASE, own, _PRIME):x}"
    if store.compare_set(f"public/{rank}", "", public) != public.encode():
        raise PipelineError(_written_by_others(f"the place of rank {rank}"))
    if rank != 0:
        shared = _shared(store, 0, own)
        return _opened(store.get(f"sealed/{rank}").decode(errors="replace"), shared, rank, token)
    key = os.urandom(_BYTES)
    for other in range(1, size):
        store.set(f"sealed/{other}", _sealed(key, _shared(store, other, own), other, token))
    return key


def prove(group: dist.ProcessGroup | None, key: bytes) -> None:
    """Prove the key of the job to each rank of a group over its own connection, and ask each for its proof.

    Gloo takes every connection as that of a rank. All ranks of the group must call it before they use the group.
    """
    count = 1 if group is None else dist.get_world_size(group)
    if group is None or count == 1 or not key:
        return
    ranks = dist.get_process_group_ranks(group)
    own = dist.get_rank(group)
    proofs = b"".join(_proof(key, group, own, other) for other in range(count))
    found = torch.zeros(len(proofs), dtype=torch.uint8)
    dist.all_to_all_single(found, torch.frombuffer(bytearray(proofs), dtype=torch.uint8), group=group)
    data = found.numpy().tobytes()
    for other in range(count):
        said = data[_BYTES * other : _BYTES * (other + 1)]
        if not hmac.compare_digest(said, _proof(key, group, other, own)):
            raise PipelineError(
                f"a process that does not know the key of this job is connected to rank {ranks[own]} in the place of rank "
                f"{ranks[other]}; nothing was read from it. Run the job again, and keep other programs away from its network."
            )


def _is_private(store: dist.Store) -> bool:
    """Whether only processes of this job can read the store: it is a file, or in the memory of one process."""
    inner: Any = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    return isinstance(inner, (dist.FileStore, dist.HashStore))


def _proof(key: bytes, group: dist.ProcessGroup, source: int, target: int) -> bytes:
    return hmac.digest(key, f"proof/{group.group_name}/{source}/{target}".encode(), "sha256")


def _shared(store: dist.Store, other: int, own: int) -> bytes:
    """Return the secret that this rank and another one have in common."""
    text = store.get(f"public/{other}").decode(errors="replace")
    try:
        public = int(text, 16) if len(text) <= 512 else 0
    except ValueError:
        public = 0
    if not 1 < public < _PRIME - 1:
        raise PipelineError(_written_by_others(f"the place of rank {other}"))
    return pow(public, own, _PRIME).to_bytes(256, "big")


def _sealed(key: bytes, shared: bytes, rank: int, token: str) -> str:
    hides, tags = _seals(shared, rank, token)
    hidden = bytes(a ^ b for a, b in zip(key, hides))
    return (hidden + hmac.digest(tags, hidden, "sha256")).hex()


def _opened(text: str, shared: bytes, rank: int, token: str) -> bytes:
    hides, tags = _seals(shared, rank, token)
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    hidden, tag = data[:_BYTES], data[_BYTES:]
    if not hmac.compare_digest(tag, hmac.digest(tags, hidden, "sha256")):
        raise PipelineError(f"{_written_by_others(f'the key for rank {rank}')} Or {TOKEN} differs between the hosts.")
    return bytes(a ^ b for a, b in zip(hidden, hides))


def _seals(shared: bytes, rank: int, token: str) -> tuple[bytes, bytes]:
    """The number that hides the key for one rank, and the key of its tag."""
    base = hmac.digest(shared, f"{rank}/{token}".encode(), "sha256")
    return hmac.digest(base, b"hides", "sha256"), hmac.digest(base, b"tags", "sha256")


def _written_by_others(what: str) -> str:
    return (
        f"a process that is no rank of this job has written {what} into the store in which its ranks agree on a key. "
        "Run the job again, and keep other programs away from its network."
    )
