"""What the benchmark of workloads measures by processes, or with a language model."""
