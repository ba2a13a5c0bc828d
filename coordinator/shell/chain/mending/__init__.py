"""How settling goes on after transactions that never took effect."""
