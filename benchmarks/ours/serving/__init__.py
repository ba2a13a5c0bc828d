"""What the benchmark of served models runs: a model of no use, and nodes that hold it."""
