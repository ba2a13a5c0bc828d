"""Commands of ``hypergpu ledger``. Nobody imports them but the command line."""
