"""Ids, errors, limits, clock and units. Imports nothing of ours."""
