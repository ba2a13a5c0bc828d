"""What the benchmark `farm` is made of: farm jobs in virtual time and under load."""
