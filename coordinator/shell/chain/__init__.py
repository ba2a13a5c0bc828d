"""The road from signed receipts to an EVM chain: local chain, RPC, signer, sealer and pump."""
