"""From signed receipts to paid nodes: what to seal, send, send again, bump, believe and stop at."""
