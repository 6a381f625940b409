"""The memory of devices: its ledger, and the negotiation of the size of the KV cache. Pure: no I/O, no clock."""

from vsched.memory.ledger import Ledger, LedgerLine, group_ledger, merge_ledgers
from vsched.memory.negotiation import Accepted, KvNegotiation, Order, SizedReport
from vsched.memory.phases import SizingPhase
from vsched.memory.pools import Pool, group_pools, size_text
from vsched.memory.rebuild import Rebuild
from vsched.memory.reservations import Reservations

__all__ = [
    "Accepted",
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
    "merge_ledgers",
    "size_text",
]
