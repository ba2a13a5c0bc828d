"""What the benchmark of workloads measures with real processes."""
