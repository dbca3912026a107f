"""An Inductor route table in slices: `python scripts/inductor_sweep.py NAMES... -o OUT`.

Repeat with `--resume OUT/table.parquet` of every earlier slice until nothing is left. What it does
is in `training/inductor_sweep.py`.
"""

import os
import sys

from routepilot.training.inductor_sweep import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
