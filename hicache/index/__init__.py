"""What is known, to the token: opaque row numbers behind token sequences, never bytes, tiers or keys."""
