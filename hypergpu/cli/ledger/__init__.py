"""What a job owes its nodes, shown and checked from outside of the coordinator."""
