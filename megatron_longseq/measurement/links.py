"""Links of limited bandwidth between ranks on one Linux machine. Needs root and iproute2.

    with LimitedLinks([[0, 1], [2, 3]], bandwidth_bytes_per_second=50e6) as links:
        pool.run(work, world_size=4, args=(links,))

    def work(links):
        os.environ.update(links.enter(int(os.environ["RANK"])))
        torch.distributed.init_process_group("gloo")
        ...

Each rank gets a network namespace with two interfaces::

    rank 0 [ outer 10.213.0.1 ]---tbf------tbf---( switch )---tbf------tbf---[ outer ] rank 2
           [ inner 10.214.0.1 ]---( node 0 )---[ inner ] rank 1

``outer`` leads over a veth pair to a switch that joins all ranks; a token bucket (``tc tbf``) at
either end limits what the rank sends and what it receives, as a network card does. ``inner`` leads
to a bridge that joins the ranks of one node, without limits unless some are asked for. A rank is
addressed by its outer address; routes take the traffic within a node to the inner bridge.

Why not one namespace per node, with an interface per rank: a gloo rank that opens a connection
does not bind it to its own interface, so the kernel would send the traffic of all ranks of a node
through the first interface, and local traffic could not be limited at all.

A link is full duplex. Over one gloo connection both directions are used at once only if the
receives are posted before the sends; otherwise gloo serves them one after the other.

Addresses exist only inside these namespaces. They are named after the process that made them;
what a killed process left behind is removed by the next one. The counters of the interfaces
(:meth:`LimitedLinks.bytes_sent`) are the kernel's and include headers.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import NodeError, UserError

_PREFIX = "longseq"
_NAMESPACE_FOLDER = Path("/run/netns")
_OUTER_NETWORK = "10.213.0"
_INNER_NETWORK = "10.214.0"
_MAXIMUM_RANKS = 250
# Jumbo frames: headers take 1 % of the bandwidth instead of 5 %.
_MTU = 9000
# How long a full queue lasts. Enough for TCP to fill the link, and it drops nothing on one that is
# shared fairly: a sender stops at its own bucket, which holds back before it drops.
_QUEUE_SECONDS = 0.5
_MASTER_PORT = 29500


def links_available() -> tuple[bool, str]:
    """Whether :class:`LimitedLinks` can work here, found out by trying, and if not, why."""
    if os.geteuid() != 0:
        return False, "limited links need root (network namespaces and tc)"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return False, f"limited links need the command {tool} (package iproute2)"
    if not hasattr(os, "setns"):
        return False, "limited links need Linux and Python 3.12 (os.setns)"
    try:
        with LimitedLinks([[0], [1]], bandwidth_bytes_per_second=1e6):
            return True, ""
    except NodeError as error:
        return False, f"limited links do not work on this kernel: {error}"


@dataclass
class LimitedLinks:
    """A context manager that makes the links and removes them; see the module's description.

    May be pickled and handed to the ranks. Ranks still running at the exit keep their interfaces
    until they end.

    Args:
        nodes: the ranks of each node; together 0, 1, .., each once.
        bandwidth_bytes_per_second: of each rank's link to other nodes, in either direction.
        inner_bandwidth_bytes_per_second: of each rank's link within its node; None: not limited.
        burst_bytes: what may pass at once after a pause; None: what the link carries in 2 ms, but
            at least 64 KiB, as a packet that TCP has not cut up yet is that large.

    Raises:
        UserError: nodes or bandwidths that cannot be.
        NodeError: this machine cannot make the links, on entering; says which command failed.
    """

    nodes: Sequence[Sequence[int]]
    bandwidth_bytes_per_second: float
    inner_bandwidth_bytes_per_second: float | None = None
    burst_bytes: int | None = None
    _name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node)
        if ranks != list(range(len(ranks))) or not 0 < len(ranks) <= _MAXIMUM_RANKS:
            raise UserError(
                f"nodes {self.nodes}: must name the ranks 0, 1, .. once each, at most "
                f"{_MAXIMUM_RANKS}; for example [[0, 1], [2, 3]]"
            )
        for name in ("bandwidth_bytes_per_second", "inner_bandwidth_bytes_per_second"):
            value = getattr(self, name)
            if value is not None and value < 1000:
                raise UserError(f"{name} {value}: must be at least 1000; 1e9 is 1 GB/s")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(node) for node in self.nodes)

    def __enter__(self) -> "LimitedLinks":
        remove_leftovers()
        taken = {path.name for path in _namespaces()}
        own = f"{_PREFIX}-{os.getpid()}-{process_start_time(os.getpid())}"
        self._name = next(
            name
            for name in (f"{own}-{i}" for i in itertools.count())
            if not any(other.startswith(f"{name}-") for other in taken)
        )
        try:
            self._create()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the links."""
        for path in _namespaces():
            if self._name and path.name.startswith(f"{self._name}-"):
                _remove(path.name)

    def enter(self, rank: int) -> dict[str, str]:
        """Moves this process into the rank's namespace; returns the environment it needs there.

        To be called before the process has opened a connection or started a thread that will.
        """
        with open(_NAMESPACE_FOLDER / self._namespace(rank)) as namespace:
            os.setns(namespace.fileno(), os.CLONE_NEWNET)
        return self.environment(rank)

    def environment(self, rank: int) -> dict[str, str]:
        """The variables by which gloo, NCCL and PyTorch's store find the links."""
        return {
            "GLOO_SOCKET_IFNAME": "outer",
            "NCCL_SOCKET_IFNAME": "outer",
            "MASTER_ADDR": _address(_OUTER_NETWORK, 0),
            "MASTER_PORT": str(_MASTER_PORT),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            # A launcher's store is out of reach from here: rank 0 has to open one.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }

    def command_prefix(self, rank: int) -> list[str]:
        """What to put before a command so that it runs as this rank."""
        variables = [f"{name}={value}" for name, value in self.environment(rank).items()]
        return ["ip", "netns", "exec", self._namespace(rank), "env", *variables]

    def bytes_sent(self, rank: int) -> dict[str, int]:
        """Bytes the rank has sent through ``outer`` and ``inner`` so far, headers included."""
        links = json.loads(_run("ip", "-n", self._namespace(rank), "-s", "-j", "link"))
        return {
            link["ifname"]: link["stats64"]["tx"]["bytes"]
            for link in links
            if link["ifname"] in ("outer", "inner")
        }

    def _namespace(self, rank: int) -> str:
        return f"{self._name}-rank{rank}"

    def _create(self) -> None:
        switch = f"{self._name}-switch"
        _run("ip", "netns", "add", switch)
        bridges = ["outer", *(f"node{index}" for index in range(len(self.nodes)))]
        commands = []
        for bridge in bridges:
            commands += [
                f"link add name {bridge} mtu {_MTU} type bridge",
                f"link set dev {bridge} up",
            ]
        _batch("ip", switch, commands)
        for index, node in enumerate(self.nodes):
            for rank in node:
                self._attach(switch, rank, index)

    def _attach(self, switch: str, rank: int, node: int) -> None:
        namespace = self._namespace(rank)
        _run("ip", "netns", "add", namespace)
        _batch(
            "ip",
            switch,
            [
                f"link add name o{rank} mtu {_MTU} type veth "
                f"peer name outer mtu {_MTU} netns {namespace}",
                f"link add name i{rank} mtu {_MTU} type veth "
                f"peer name inner mtu {_MTU} netns {namespace}",
                f"link set dev o{rank} master outer",
                f"link set dev i{rank} master node{node}",
                f"link set dev o{rank} up",
                f"link set dev i{rank} up",
            ],
        )
        inner = [
            f"route add {_address(_OUTER_NETWORK, peer)}/32 via {_address(_INNER_NETWORK, peer)} "
            f"src {_address(_OUTER_NETWORK, rank)}"
            for peer in self.nodes[node]
            if peer != rank
        ]
        _batch(
            "ip",
            namespace,
            [
                f"address add {_address(_OUTER_NETWORK, rank)}/24 dev outer",
                f"address add {_address(_INNER_NETWORK, rank)}/24 dev inner",
                "link set dev lo up",
                "link set dev outer up",
                "link set dev inner up",
                *inner,
            ],
        )
        self._limit(namespace, "outer", self.bandwidth_bytes_per_second)
        self._limit(switch, f"o{rank}", self.bandwidth_bytes_per_second)
        if self.inner_bandwidth_bytes_per_second is not None:
            self._limit(namespace, "inner", self.inner_bandwidth_bytes_per_second)
            self._limit(switch, f"i{rank}", self.inner_bandwidth_bytes_per_second)

    def _limit(self, namespace: str, device: str, bytes_per_second: float) -> None:
        burst = self.burst_bytes or max(64 * 1024, round(bytes_per_second * 0.002))
        queue = max(round(bytes_per_second * _QUEUE_SECONDS), 16 * burst)
        # In tc's language "bps" is bytes per second.
        _run(
            *("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf"),
            *("rate", f"{round(bytes_per_second)}bps", "burst", str(burst), "limit", str(queue)),
        )


def remove_leftovers() -> list[str]:
    """Removes the namespaces of processes that no longer run; returns their names."""
    removed = []
    for path in _namespaces():
        match = re.match(rf"{_PREFIX}-(\d+)-(\d+)-", path.name)
        if match and process_start_time(int(match[1])) != int(match[2]):
            _remove(path.name)
            removed.append(path.name)
    return removed


def _namespaces() -> list[Path]:
    return sorted(_NAMESPACE_FOLDER.glob(f"{_PREFIX}-*"))


def process_start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none.

    With the number of the process it names one process for good: numbers are used again.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field, the command in parentheses, may contain anything.
    return int(stat.rpartition(")")[2].split()[19])


def _address(network: str, rank: int) -> str:
    return f"{network}.{rank + 1}"


def _batch(tool: str, namespace: str, commands: list[str]) -> None:
    _run(tool, "-n", namespace, "-batch", "-", text="\n".join(commands) + "\n")


def _remove(namespace: str) -> None:
    # Another process may be removing the same leftovers.
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _run(*command: str, text: str = "") -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NodeError(f"{command[0]}: not found; install iproute2") from error
    if done.returncode:
        reason = done.stderr.strip() or f"exit status {done.returncode}"
        raise NodeError(f"{' '.join(command)}: {reason}\n{text}".strip())
    return done.stdout
