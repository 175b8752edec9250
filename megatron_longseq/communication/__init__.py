"""How data moves between ranks: the ring engine and the exchange of heads for tokens."""

from .agreement import GridAgreement
from .all_to_all import HeadExchange
from .buffers import BufferPool
from .groups import GroupPlace
from .ring import Ring, Rotation
from .row_exchange import RowExchange
from .schedule import DoubleRing, Hop, Schedule, SingleRing, Step
from .transport import CommunicationError, CommunicationTimeout

__all__ = [
    "BufferPool",
    "CommunicationError",
    "CommunicationTimeout",
    "DoubleRing",
    "GridAgreement",
    "GroupPlace",
    "HeadExchange",
    "Hop",
    "Ring",
    "Rotation",
    "RowExchange",
    "Schedule",
    "SingleRing",
    "Step",
]
