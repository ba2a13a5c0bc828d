"""The embedded store: bulk bytes by HTTP from processes of its own, for tickets alone."""
