"""The state machine: events in, commands out. No I/O, no clock, no randomness of its own."""
