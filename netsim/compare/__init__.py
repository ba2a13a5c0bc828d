"""`hypergpu compare`: one job by several strategies in one world, by the same seeds."""
