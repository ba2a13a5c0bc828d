"""`python -m hypergpu.cli`, for where the command is not on the path."""

from hypergpu.cli.main import main

main()
