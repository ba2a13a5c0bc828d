"""`hypergpu.map`, `evaluate` and `sweep`: many independent items become a job, and its results a
file.
"""
