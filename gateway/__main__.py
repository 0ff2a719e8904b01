"""`python -m gateway` is the `forebay` command."""

from gateway.cli import main

main()
