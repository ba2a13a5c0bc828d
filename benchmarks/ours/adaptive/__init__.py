"""Parts of the benchmark of the two laws: a node never hurts, and a node counts."""
