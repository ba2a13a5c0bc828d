"""What the dashboard's server does: calls the coordinator, keeps history, serves HTTP."""
