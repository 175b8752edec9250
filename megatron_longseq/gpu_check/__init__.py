"""A check for one GPU: are the lines that only a GPU can run right, and how fast are they?

``scripts/gpu_check.sh`` runs it: every block kernel against attention in fp64, its speed against
PyTorch's own attention, several ranks on the one GPU through host-staged messages, streams, pinned
memory, and memory over repeated calls. It needs PyTorch and the plain-PyTorch parts of this package
alone: no Megatron, no network. With ``--device cpu`` the same code runs on a CPU, which is how it
is tested.

    plan.py      the list of checks, each with its time limit
    kernels.py   one kernel and dtype, in one process
    speed.py     one kernel and dtype, timed
    ranks.py     2D attention in several processes
    report.py    terminal, Markdown and JSON
"""
