"""A coordinator and its nodes as processes that the command line starts and owns."""
