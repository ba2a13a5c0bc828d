"""What trains: one file for each way of writing a workload."""
