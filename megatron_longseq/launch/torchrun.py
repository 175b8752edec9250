"""The torchrun command line of a training run: what a GPU machine executes."""

import sys
from collections.abc import Sequence


def torchrun_command(
    arguments: Sequence[str],
    *,
    processes: int,
    module: str = "megatron_longseq.pretrain_gpt",
) -> list[str]:
    """Returns the argument vector that runs ``module`` in ``processes`` local ranks."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        "-m",
        module,
        *arguments,
    ]
