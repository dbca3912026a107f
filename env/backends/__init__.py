"""One file per compiler, all behind the protocol of `base.py`."""
