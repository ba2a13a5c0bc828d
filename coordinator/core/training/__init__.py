"""Training, a kind of leased work: rounds of shards whose updates are folded into one model."""
