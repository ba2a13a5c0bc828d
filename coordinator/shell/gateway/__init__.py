"""The gateway: a process without state that holds nodes' streams and speaks to coordinators."""
