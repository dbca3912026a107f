"""How Python is started on one of our modules: with nothing from the folder where one stands.

Owns the command line. `python -m` takes modules from the current folder before all others, and
that may be the folder of somebody else's model: a `json.py` beside it would run.
"""

from __future__ import annotations

import os
import sys

#: Runs the module that the first argument names, after the current folder left the search path.
_RUN = (
    "import sys; sys.path[:1] = [p for p in sys.path[:1] if p]; import runpy;"
    " runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str) -> list[str]:
    """Command line that runs a module, to which arguments may be added.

    Where this process itself finds modules in the current folder (`python -m routepilot`, or a
    session at the prompt), so does the other: a backend of one's own may lie there.

    Args:
        module: Full name of a module that ends in `if __name__ == "__main__"`.
    """
    if "" in sys.path or os.getcwd() in sys.path:
        return [sys.executable, "-m", module]
    return [sys.executable, "-c", _RUN, module]
