"""Jobs in worlds for the benchmarks of network-aware training: runs, what is compared, figures."""
