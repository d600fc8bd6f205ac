"""What users write, for mypy to check."""
