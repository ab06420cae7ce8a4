"""`python -m raydpfl` is the `raydpfl` command."""

from raydpfl.cli import main

main()
