"""Engines: adapters between an inference engine's words and kvtide's own."""
