"""What the pool, its parent process and a rank say to each other.

One job is one function run on every rank. The pool writes a :class:`Job` to the parent process;
the parent forks the ranks, watches them, and answers with one :class:`RankStatus` per rank. What a
rank returns, raises or prints goes through files in the job's directory, so that neither its size
nor a killed rank can block anybody.
"""

import pickle
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Set in the environment of a rank, where no pool can be made.
INSIDE_RANK = "MEGATRON_LONGSEQ_INSIDE_RANK"


@dataclass(frozen=True)
class Job:
    """One function to run on every rank.

    ``call`` is the pickled ``(function, args, kwargs)``; ``preparation`` is what
    :mod:`multiprocessing` needs to find the caller's modules in another process.
    """

    call: bytes
    module: str
    preparation: dict[str, Any]
    world_size: int
    directory: Path
    timeout_seconds: float
    backend: str | None = None
    threads: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    foreground: tuple[int, ...] = ()

    def log_path(self, rank: int) -> Path:
        """What the rank printed, unless it is a foreground rank."""
        return self.directory / f"rank{rank}.log"

    def result_path(self, rank: int) -> Path:
        """Pickle of what the rank's function returned."""
        return self.directory / f"rank{rank}.result"

    def error_path(self, rank: int) -> Path:
        """Pickle of the :class:`RankError` of a rank whose function raised."""
        return self.directory / f"rank{rank}.error"

    def stack_path(self, rank: int) -> Path:
        """Python stacks of the rank, written when it is asked for them before it is killed."""
        return self.directory / f"rank{rank}.stack"


@dataclass(frozen=True)
class RankError:
    """An exception that left a rank's function, in a form any process can read."""

    type_name: str
    message: str
    traceback: str
    is_user_error: bool
    exit_code: int


@dataclass(frozen=True)
class RankStatus:
    """How a rank ended.

    ``order`` counts the endings: 0 ended first. ``killed`` says that the parent ended it, because
    another rank had failed or because the time was over (``timed_out``). ``exit_code`` is negative
    for a signal, as in :mod:`subprocess`.
    """

    rank: int
    order: int
    exit_code: int
    killed: bool
    timed_out: bool


def send_message(connection: socket.socket, message: object) -> None:
    """Writes one length-prefixed pickle."""
    payload = pickle.dumps(message)
    connection.sendall(struct.pack("!Q", len(payload)) + payload)


def receive_message(connection: socket.socket) -> Any:
    """Reads one length-prefixed pickle; raises EOFError when the other side is gone."""
    (length,) = struct.unpack("!Q", _receive_exactly(connection, 8))
    return pickle.loads(_receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other side closed the connection")
        parts += part
    return bytes(parts)
