"""The memory of devices: its ledger, and the negotiation of the size of the KV cache. Pure: no I/O, no clock."""

from vsched.memory.ledger import Ledger, LedgerLine, SizingPhase, group_ledger
from vsched.memory.negotiation import Accepted, KvNegotiation, Order, Rebuild, Sized
from vsched.memory.pools import HostShares, Pool, group_pools, on_host, size_text

__all__ = [
    "Accepted",
    "HostShares",
    "KvNegotiation",
    "Ledger",
    "LedgerLine",
    "Order",
    "Pool",
    "Rebuild",
    "Sized",
    "SizingPhase",
    "group_ledger",
    "group_pools",
    "on_host",
    "size_text",
]
