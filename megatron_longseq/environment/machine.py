"""GPUs, driver, and limits of this machine, asked without CUDA and without root."""

import contextlib
import csv
import os
import resource
import shutil
import socket
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

QUERY_SECONDS = 10.0
RESOLVE_SECONDS = 3.0
GPU_FIELDS = ("index", "name", "driver_version", "memory.total", "memory.free", "compute_cap")
WATCHED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONPATH",
)


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver's own tool lists it; memory in MiB, ``None`` where it tells none."""

    index: int
    name: str
    memory_mib: int | None
    free_mib: int | None
    compute_capability: tuple[int, int] | None


@dataclass(frozen=True)
class Space:
    """Bytes of a file system."""

    path: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Machine:
    """Facts about this machine.

    Attributes:
        driver: of NVIDIA, ``None`` without one.
        gpu_note: why no GPUs could be listed although there is a driver.
        cpus: how many this process may use.
        memory_bytes: physical memory, or the limit of this process's control group.
        open_files: soft and hard limit of open files.
        addresses: what the host's own name resolves to; empty if it does not.
        interfaces: names of the network interfaces.
        spaces: of /dev/shm, the working folder and the temporary folder.
        variables: environment variables that change what runs, as set.
    """

    gpus: tuple[Gpu, ...]
    driver: str | None
    gpu_note: str | None
    cpus: int
    memory_bytes: int
    open_files: tuple[int, int]
    hostname: str
    addresses: tuple[str, ...]
    interfaces: tuple[str, ...]
    spaces: tuple[Space, ...]
    variables: dict[str, str]


def describe_machine() -> Machine:
    """Asks this machine."""
    gpus, driver, note = list_gpus()
    hostname = socket.gethostname()
    places = {str(Path(p).resolve()): p for p in (tempfile.gettempdir(), os.getcwd(), "/dev/shm")}
    return Machine(
        gpus=gpus,
        driver=driver,
        gpu_note=note,
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_limit(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        hostname=hostname,
        addresses=_addresses(hostname),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        spaces=tuple(space for path in places.values() if (space := _space(path))),
        variables={name: os.environ[name] for name in WATCHED_VARIABLES if name in os.environ},
    )


def list_gpus() -> tuple[tuple[Gpu, ...], str | None, str | None]:
    """(GPUs, driver's version, why they could not be listed), from nvidia-smi."""
    driver = _driver_of_kernel()
    if shutil.which("nvidia-smi") is None:
        return (), driver, "nvidia-smi is not on the PATH" if driver else None
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}"]
    try:
        answer = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=QUERY_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), driver, f"nvidia-smi: {error}"
    if answer.returncode != 0:
        lines = (answer.stdout + answer.stderr).strip().splitlines() or ["no output"]
        return (), driver, f"nvidia-smi: {lines[0]}"
    gpus = []
    for row in csv.reader(answer.stdout.splitlines(), skipinitialspace=True):
        if len(row) == len(GPU_FIELDS):
            index, name, version, total, free, capability = row
            driver = version
            gpus.append(
                Gpu(int(index), name, _integer(total), _integer(free), _capability(capability))
            )
    return tuple(gpus), driver, None


def _driver_of_kernel() -> str | None:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((w for w in words if w.count(".") >= 1 and w.replace(".", "").isdigit()), None)


def _integer(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _capability(text: str) -> tuple[int, int] | None:
    major, _, minor = text.strip().partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _addresses(hostname: str) -> tuple[str, ...]:
    """What the name resolves to. A name server that does not answer must not hold up a report."""
    found: list[str] = []

    def resolve() -> None:
        with contextlib.suppress(OSError):
            entries = socket.getaddrinfo(hostname, None, proto=socket.IPPROTO_TCP)
            found.extend(dict.fromkeys(str(entry[4][0]) for entry in entries))

    resolver = threading.Thread(target=resolve, daemon=True)
    resolver.start()
    resolver.join(RESOLVE_SECONDS)
    return tuple(found)


def _memory_limit() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def _space(path: str) -> Space | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Space(path, usage.free, usage.total)
