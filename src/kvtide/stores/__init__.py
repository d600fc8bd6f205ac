"""Stores: where the bytes go."""
