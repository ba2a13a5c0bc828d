"""What is read off the chain beside transactions: its head, and what the ledger says of epochs."""
