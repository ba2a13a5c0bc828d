"""`hypergpu.map` and `evaluate`: many independent items become a job, and its results a file."""
