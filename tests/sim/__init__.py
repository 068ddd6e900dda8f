"""The whole state machine against simulated clients, lanes and stores. A seed is a run; see run.py."""
