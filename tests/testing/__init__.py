"""Tests of :mod:`kvtide.testing` itself."""
