"""What every leased work needs, whatever is worked on: nodes, their leases, and their shares."""
