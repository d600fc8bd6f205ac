"""The errors kvtide raises, and whose fault each of them is.

Everything a caller may want to catch derives from :class:`KVTideError`. An error is raised only for
what the caller can mend: a wrong setting, a store that is gone, a call after close. What happens to
a single key is never an exception but a :class:`kvtide.stores.Status`.
"""

from collections.abc import Sequence
from typing import ClassVar


class KVTideError(Exception):
    """The base of all errors kvtide raises on purpose."""


class ConfigError(KVTideError):
    """The configuration is wrong: every fault at once, each with the setting to change.

    ``faults`` holds one sentence per fault; the message lists them all, so that one restart mends
    all of them.
    """

    _several: ClassVar[str] = "{} settings are wrong:"
    """What the message of several faults starts with, around their number."""

    def __init__(self, faults: str | Sequence[str]) -> None:
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(faults)
        if len(self.faults) == 1:
            message = self.faults[0]
        else:
            lines = "".join(f"\n  {number}. {fault}" for number, fault in enumerate(self.faults, 1))
            message = self._several.format(len(self.faults)) + lines
        super().__init__(message)


class UnsupportedModelError(ConfigError):
    """The engine runs a kind of model, or in a way, that kvtide cannot serve yet."""

    _several: ClassVar[str] = "{} things stand against this model or how it is run:"


class StoreError(KVTideError):
    """A store as a whole cannot do what was asked."""


class StoreOpenError(StoreError):
    """A store could not be opened: the message says why and what to change."""


class StoreLostError(StoreError):
    """A store that worked is gone; every key is a miss until it returns."""


class StoreClosedError(StoreError):
    """A store was called after its ``close``: a fault of the caller."""


class UnregisteredMemoryError(StoreError):
    """A batch points outside the memory registered with the store: a fault of the caller."""


class EngineRunError(KVTideError):
    """An engine that kvtide itself started, for a demonstration or a measurement, failed."""
