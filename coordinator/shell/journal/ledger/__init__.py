"""What the journal keeps about pay: receipts, epochs, and transactions on their way to a chain."""
