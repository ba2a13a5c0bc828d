"""Everything that must survive a restart: jobs' events and snapshots, nodes, tokens, nonces."""
