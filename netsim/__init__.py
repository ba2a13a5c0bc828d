"""Emulates networks like the internet: one description of links, and four ways to run it."""
