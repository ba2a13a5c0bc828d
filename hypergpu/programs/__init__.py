"""Programs: models and losses as data, that nodes run without any code of their user's.

Here is what needs no torch: the container with its checks, the operators that a program may call,
and the files that hold a job's samples. `hypergpu.workloads.networks.program` runs programs,
`hypergpu.workloads.networks.tracing` makes them.
"""
