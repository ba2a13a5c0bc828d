"""What processes agree on about a dataset: its files, and who trains on which samples."""
