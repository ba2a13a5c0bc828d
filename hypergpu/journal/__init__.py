"""The public feed of a job's journal: events, their sentences, and the price of accepted work."""
