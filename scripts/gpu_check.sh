#!/usr/bin/env bash
#
# Checks, on one GPU and in under ten minutes, the lines of this package that only a GPU can run.
#
#   scripts/gpu_check.sh [--output FILE.md] [--device cpu] [--only TEXT] [--minutes N]
#
# Needs a Python 3.12 with a CUDA build of PyTorch (2.11 or newer), and nothing else: no Megatron,
# no set-up, no network. Writes docs/gpu-check.md (another file with --output) and a JSON beside it.
# Exit status: 0 if everything agrees, 1 if something is off, 3 without a GPU.
#
# Environment:
#   PYTHON   the Python to use; otherwise .venv/bin/python if it is there, else python3.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${PYTHON:-}
if [[ -z $python ]]; then
    python=$root/.venv/bin/python
    [[ -x $python ]] || python=python3
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    echo "gpu check: $python is not Python 3.12 or newer; name one in PYTHON" >&2
    exit 2
fi
if ! "$python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))'; then
    echo "gpu check: $python has no PyTorch; name another Python in PYTHON" >&2
    exit 2
fi
cd "$root"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
exec "$python" -m megatron_longseq.gpu_check "$@"
