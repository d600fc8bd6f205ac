"""What Mooncake's return codes mean to the store contract.

The numbers are those of ``ErrorCode`` in Mooncake's ``types.h``, as version 0.3.13 returns them.
"""

from __future__ import annotations

from kvtide.stores.base import Status

OK = 0
PRESENT = 1
NO_SPACE = -200
NOT_READY = -703
MISSING = -704
LEASED = -706
LEASE_EXPIRED = -707
TRANSFER_FAILED = -800
RPC_FAILED = -900
RPC_TIMED_OUT = -901
QUOTA_EXCEEDED = -1700
UNKNOWN_TENANT = -1701

LOST = frozenset({RPC_FAILED, RPC_TIMED_OUT})
"""The master is gone, or does not answer: it is the whole pool that is lost."""
NO_VALUE = -600
"""Bad arguments: also what stands for a value without bytes, which Mooncake cannot hold."""

_ABSENT = {MISSING: Status.MISSING, NOT_READY: Status.MISSING}


def status_of_put(code: int) -> Status:
    """Return what became of a key that was put."""
    if code == OK:
        return Status.OK
    return Status.NO_SPACE if code in (NO_SPACE, QUOTA_EXCEEDED) else Status.FAILED


def status_of_get(code: int, value_bytes: int) -> Status:
    """Return what became of a key that was got into ``value_bytes``: OK only for all of them.

    A lease that ran out during the read is FAILED: the value may have been evicted under it.
    """
    return Status.OK if code == value_bytes else _ABSENT.get(code, Status.FAILED)


def status_of_remove(code: int) -> Status:
    """Return what became of a key that was to be removed; a leased one stays."""
    return Status.OK if code == OK else _ABSENT.get(code, Status.FAILED)
