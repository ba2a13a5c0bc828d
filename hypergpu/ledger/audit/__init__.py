"""What anybody can check of a job's pay, from files and from what the chain says."""
