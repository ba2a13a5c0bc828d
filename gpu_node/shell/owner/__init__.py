"""The owner of the machine: limits, own data and interpreter, and the report that commands read."""
