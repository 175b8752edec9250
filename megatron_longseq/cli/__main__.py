"""``python -m megatron_longseq.cli``."""

import sys

from . import main

sys.exit(main())
