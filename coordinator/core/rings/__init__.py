"""A ring of stages that answers calls: pure, and the same for every kind of work that uses one."""
