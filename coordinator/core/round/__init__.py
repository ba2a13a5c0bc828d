"""The round machine: opens, staffs and closes the rounds of one job, one event at a time."""
