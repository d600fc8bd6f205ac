"""Engines kvtide runs under; each is a package of its own, imported only inside that engine."""
