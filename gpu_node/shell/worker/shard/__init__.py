"""From a request to an update file."""
