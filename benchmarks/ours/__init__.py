"""Our own processes, started as a user starts them, for benchmarks that measure the whole."""
