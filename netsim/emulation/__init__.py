"""What every backend shares: requests, the child process that answers them, namespaces."""
