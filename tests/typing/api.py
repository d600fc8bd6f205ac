"""User code that must type-check: it is read by mypy in strict mode and never run."""

from collections.abc import Sequence

from kvtide import ConfigError
from kvtide.core.batch import Batch
from kvtide.core.layout import Region
from kvtide.stores.base import Status, Store


class NullStore(Store):
    """A store of one's own: it forgets everything."""

    def register(self, region: Region) -> None:
        """Accept any memory."""

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Hold nothing."""
        return [False] * len(keys)

    def put(self, batch: Batch) -> list[Status]:
        """Have no room."""
        return [Status.NO_SPACE] * len(batch)

    def get(self, batch: Batch) -> list[Status]:
        """Find nothing."""
        return [Status.MISSING] * len(batch)

    def remove(self, keys: Sequence[str]) -> list[Status]:
        """Find nothing to remove."""
        return [Status.MISSING] * len(keys)

    def close(self) -> None:
        """Hold nothing to give back."""


def faults_of(error: ConfigError) -> tuple[str, ...]:
    """Read the faults of a refused configuration."""
    return error.faults


store: Store = NullStore()
answers: list[bool] = store.exists(["a", "b"])
statuses: list[Status] = store.get(Batch(["a"], [[0]], [[1]]))
