"""The parts of pay that do IO: database, chain, transactions, and the coordinator's plugin."""
