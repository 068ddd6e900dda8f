"""Decisions turned into byte work: which neighbouring blocks move as one, which layers move together."""
