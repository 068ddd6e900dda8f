"""Policies see rows of metadata, never tokens, blocks or keys."""
