"""What performs the commands of farm jobs, and what goes with them: inputs, results, comparison."""
