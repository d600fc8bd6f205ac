"""Tests; they mirror the sources."""
