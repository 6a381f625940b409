"""The memory of devices: its ledger, and the negotiation of the size of the KV cache. Pure: no I/O, no clock."""

from vsched.memory.ledger import Ledger, LedgerLine, group_ledger
from vsched.memory.negotiation import Accepted, KvNegotiation, Order, SizedReport
from vsched.memory.phases import SizingPhase
from vsched.memory.pools import Pool, group_pools, size_text
from vsched.memory.rebuild import Rebuild
from vsched.memory.reservations import Reservations
from vsched.memory.shares import HostShares, on_host

__all__ = [
    "Accepted",
    "HostShares",
    "KvNegotiation",
    "Ledger",
    "LedgerLine",
    "Order",
    "Pool",
    "Rebuild",
    "Reservations",
    "SizedReport",
    "SizingPhase",
    "group_ledger",
    "group_pools",
    "on_host",
    "size_text",
]
