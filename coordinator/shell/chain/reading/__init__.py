"""What the ledger is asked about epochs, as of one block."""
