"""Linear attention over ranks equals the recurrence: output, states, every gradient, every rank."""

import torch.distributed as dist
from recurrences import EXACT, KINDS, PACKED, Case, errors, expected, small_operator

from megatron_longseq.communication.scan import Scan

SCHEDULES = {
    "ring": {"schedule": "ring"},
    "gather": {"schedule": "all_gather"},
    "log": {"schedule": "log_scan"},
    "blocks of one": {"schedule": "all_scan", "blocks": 1},
    "blocks of three": {"schedule": "all_scan", "blocks": 3},
    "two levels": {"schedule": "two_level", "node_size": 2},
}


def parity(cases):
    """The largest errors of each (case, layout, schedule), with their names."""
    group, references, operators, worst = dist.group.WORLD, {}, {}, {}
    for case, layout, schedule in cases:
        if case not in references:
            references[case] = expected(case)
        if (layout, schedule) not in operators:
            scan = Scan(
                group,
                layout=layout,
                timeout_seconds=30,
                check_agreement=False,
                **SCHEDULES[schedule],
            )
            operators[layout, schedule] = small_operator(group, layout, scan=scan)
        found = errors(case, operators[layout, schedule], group, layout, references[case])
        worst[case, layout, schedule] = max((value, name) for name, value in found.items())
    return worst


def assert_exact(results):
    for rank, worst in enumerate(results):
        for case, (error, name) in worst.items():
            assert error < EXACT, (rank, case, name, error)


def grid(schedules, kinds=KINDS, layouts=("zigzag", "contiguous")):
    return [
        (Case(kind, documents), layout, schedule)
        for kind in kinds
        for documents in (None, PACKED)
        for layout in layouts
        for schedule in schedules
    ]


def test_all_kinds_schedules_and_layouts_equal_the_recurrence(ranks):
    cases = grid(SCHEDULES)
    assert_exact(ranks.run(parity, world_size=4, args=(cases,), backend="gloo"))
