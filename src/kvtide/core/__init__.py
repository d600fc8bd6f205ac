"""The engine-neutral core: pure decisions, no I/O, no threads, no clock."""
