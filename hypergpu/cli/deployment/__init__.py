"""A ledger on a chain that is there: its options, what is lacking, and the one that is made."""
