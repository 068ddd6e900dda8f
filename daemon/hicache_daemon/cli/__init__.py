"""The command line. Importing it is cheap: each command imports what it needs when it runs."""
