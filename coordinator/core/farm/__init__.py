"""Farm jobs: many independent items that are given out in bundles. One kind of work."""
