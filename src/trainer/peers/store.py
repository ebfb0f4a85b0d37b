"""The store at which processes of a run meet: torch's key-value server, at a free port of node 0."""

import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

_PROBE_SECONDS = 3.0
_ANSWER_SECONDS = 30.0
"""Longer than a busy server takes. Connections to a machine that is gone without a word are given up by their users."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A connection to the store of a run, and this node's place among those that meet there."""

    store: TCPStore
    address: str
    """Of the store, as this machine reaches it."""

    port: int
    token: str
    """Tells this store from that of another run at the same port."""

    node_rank: int
    num_nodes: int

    def connect_again(self) -> TCPStore:
        """Another connection, for a thread that must not wait until the first one is free."""
        return _connect(self.address, self.port)


def host_meeting(*, num_nodes: int = 1) -> Meeting:
    """Start a store on this machine, for node 0. It serves as long as its `store` lives."""
    # The system picks the port while it binds it: no port that is free now and taken a moment later.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_ANSWER_SECONDS))
    token = secrets.token_hex(8)
    store.set(_key(token), "here")
    return Meeting(store=store, address="localhost", port=store.port, token=token, node_rank=0, num_nodes=num_nodes)


def join_meeting(addresses: Sequence[str], port: int, token: str, *, node_rank: int, num_nodes: int) -> Meeting | None:
    """Connect to the store of node 0; None if it answers at none of its addresses."""
    for address in addresses:
        if not _listens(address, port):
            continue
        with suppress(RuntimeError):  # torch's errors of connections are such
            store = _connect(address, port)
            if store.check([_key(token)]):
                return Meeting(
                    store=store, address=address, port=port, token=token, node_rank=node_rank, num_nodes=num_nodes
                )
    return None


def _connect(address: str, port: int) -> TCPStore:
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_ANSWER_SECONDS))


def _listens(address: str, port: int) -> bool:
    # torch would try for half a minute, and write of each try on the console.
    try:
        socket.create_connection((address, port), timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def _key(token: str) -> str:
    return f"meeting/{token}"
