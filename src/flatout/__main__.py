"""`python -m flatout`."""

from flatout.cli.main import main

main()
