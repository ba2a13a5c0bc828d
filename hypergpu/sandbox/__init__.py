"""The sandbox of processes that run workloads' code: bubblewrap, else landlock and seccomp."""
