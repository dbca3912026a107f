"""The H200 route table in slices: `python scripts/h200_sweep.py MODELS -o OUT --seconds 500`.

Repeat with `--resume OUT/table.parquet` (of every earlier slice) until nothing is left. What it
does is in `training/gpu_sweep.py`.
"""

import os
import sys

from routepilot.training.gpu_sweep import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a lane in the middle of a build must not hold the exit up
