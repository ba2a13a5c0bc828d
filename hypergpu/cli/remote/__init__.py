"""The coordinator as the command line sees it: connection, calls, transfers, views."""
