"""Decisions of the dashboard's server: state of the feed, alerts, series, sessions. Pure."""
