"""EVM chains as everything here sees them: RPC, signer, contracts, profiles, and local ones."""
