"""The node's state on disk: keys, certificate, memory, receipts and nonces."""
