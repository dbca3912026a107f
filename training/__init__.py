"""Using it: collect, train, tune, compare, and the command line."""
