"""What a node, an operator or anybody does on a ledger, each by its own key."""
