"""What the worker does with the items of farm jobs: one file an item kind."""
