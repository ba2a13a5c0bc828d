"""The rules of pay as pure functions: no clock, no chain, no database."""
