"""Speaking JSON-RPC with a machine that may be down, slow, limited or wrong."""
