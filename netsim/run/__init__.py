"""A world with real programs in it: a coordinator, nodes, and what goes wrong with them."""
