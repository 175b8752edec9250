"""What the tests of scans share: chains of random pairs, and the states a serial pass finds."""

import time

import torch
import torch.distributed as dist

from megatron_longseq.lasp.recurrence import Affine
from megatron_longseq.token_layout import SegmentChain

KINDS = {"scalar": (), "diagonal": (4,), "matrix": (4, 4)}
LAYOUTS = ("zigzag", "contiguous")
FLAT = ("ring", "all_gather", "log_scan", "all_scan")


def random_pair(kind, seed, dtype=torch.float64, batch=2):
    """B = 2, H = 3, d = 4, e = 5; ``batch``: of the transition."""
    generator = torch.Generator().manual_seed(seed)
    transition = torch.randn(batch, 3, *KINDS[kind], generator=generator, dtype=torch.float64) / 2
    return Affine(transition.to(dtype), random_state(seed + 500, dtype))


def random_state(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64).to(dtype)


def random_chain(kind, layout, size, seed=0, **options):
    """(pairs by chain position, the chain); the same on every rank, other data at each position."""
    chain = SegmentChain(size, layout)
    pairs = [random_pair(kind, 1000 * seed + p, **options) for p in range(chain.length)]
    return pairs, chain


def serial_states(pairs, initial, reverse=False):
    """(S_in by chain position, the state after all): the recurrence by its definition."""
    states, state = {}, torch.zeros_like(pairs[0].state) if initial is None else initial
    positions = range(len(pairs))
    for position in positions[::-1] if reverse else positions:
        states[position] = state
        state = pairs[position].apply(state)
    return states, state


def own(chain, values, position=None):
    """Those of this rank's segments, in its local order."""
    here = dist.get_rank() if position is None else position
    return [values[p] for p in chain.positions(here)]


def largest_error(actual, expected):
    return max((a - b).abs().max().item() for a, b in zip(actual, expected, strict=True))


def wait_until(condition, seconds=10.0):
    """Whether ``condition`` comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()
