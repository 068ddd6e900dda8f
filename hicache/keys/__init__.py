"""Identity: which bytes may stand for which tokens."""
