"""hicached: the sidecar that decides, and the command line beside it."""
