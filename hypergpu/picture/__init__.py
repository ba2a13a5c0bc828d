"""Pictures as text, for the command line and for netsim."""
