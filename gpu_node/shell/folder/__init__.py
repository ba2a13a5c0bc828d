"""The folder of the node on disk: paths, keys, memory and receipts."""
