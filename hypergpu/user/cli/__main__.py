"""`python -m hypergpu.user.cli`, for where the command is not on the path."""

from hypergpu.user.cli.main import main

main()
