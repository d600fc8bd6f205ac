"""One Mooncake client: how it is set up, and the calls of it that the store makes.

The client is a native object that prints its reasons on stderr and answers in codes. ``setup`` and
``close`` hold the interpreter lock for as long as they take, so both are bounded; its other calls
release it. After ``close`` any call crashes the process: the store sees to it that there is none.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from kvtide.core.batch import Batch
from kvtide.core.layout import Region
from kvtide.errors import StoreOpenError
from kvtide.stores.mooncake_codes import LOST, OK
from kvtide.stores.mooncake_package import mooncake_module
from kvtide.stores.mooncake_settings import DEFAULT_TENANT, MooncakeSettings

_POLL_S = 0.2
_PROBE_TIMEOUT_S = 1.0
_PROBE_KEY = "kvtide:probe"
_SETUP_TRIES = 5
_IS_REFUSED_FAST_S = 1.0
_SHARE_OF_TIMEOUT = 0.8
"""A set-up that fails sooner than this part of the time limit has had an answer."""

TCP_LANES = 16
"""Transfers with one TCP peer that run at a time, the most that Mooncake takes; others queue."""
MAX_TRANSFER_TIMEOUT_S = 3
"""A TCP transfer that makes no progress for longer has failed, and is never carried out after."""


class MooncakeClient:
    """A connected client; :func:`connect` makes it.

    Every call may come from any thread, and answers one code per key: what
    :mod:`kvtide.stores.mooncake_codes` explains, or, for ``get``, the bytes read.
    """

    def __init__(self, native: Any, settings: MooncakeSettings) -> None:  # noqa: ANN401
        self._native = native
        self._settings = settings
        self._replication = mooncake_module().ReplicateConfig()
        self._replication.replica_num = settings.num_replicas
        if settings.preferred_segment:
            self._replication.preferred_segment = settings.preferred_segment

    def register(self, region: Region) -> bool:
        """Announce memory that the pool may read and write; it must not overlap what is known."""
        return bool(self._native.register_buffer(region.address, region.num_bytes) == OK)

    def exists(self, keys: Sequence[str]) -> list[int]:
        """Return 1 for each key that is present, which leases it."""
        return list(self._native.batch_is_exist(list(keys)))

    def put(self, batch: Batch) -> list[int]:
        """Store values of one segment each; a value that is present stays, and nothing moves."""
        return list(
            self._native.batch_put_from(
                list(batch.keys),
                [addresses[0] for addresses in batch.addresses],
                [sizes[0] for sizes in batch.sizes],
                self._replication,
            )
        )

    def get(self, batch: Batch) -> list[int]:
        """Read values of one segment each, and lease them."""
        return list(
            self._native.batch_get_into(
                list(batch.keys),
                [addresses[0] for addresses in batch.addresses],
                [sizes[0] for sizes in batch.sizes],
            )
        )

    def put_segments(self, batch: Batch) -> list[int]:
        """Store values of any number of segments, handed over as they are."""
        return list(
            self._native.batch_put_from_multi_buffers(
                list(batch.keys),
                [list(addresses) for addresses in batch.addresses],
                [list(sizes) for sizes in batch.sizes],
                self._replication,
            )
        )

    def get_segments(self, batch: Batch) -> list[int]:
        """Read values into any number of segments."""
        return list(
            self._native.batch_get_into_multi_buffers(
                list(batch.keys),
                [list(addresses) for addresses in batch.addresses],
                [list(sizes) for sizes in batch.sizes],
            )
        )

    def remove(self, keys: Sequence[str]) -> list[int]:
        """Remove the keys that nobody leases."""
        return list(self._native.batch_remove(list(keys)))

    def is_answered(self) -> bool:
        """Tell whether the master answers; a master that is down costs nothing to find out."""
        try:
            _dial(self._settings, _PROBE_TIMEOUT_S).close()
        except OSError:
            return False
        answers = self.exists([_PROBE_KEY])
        return bool(answers) and not LOST.intersection(answers)

    def close(self) -> None:
        """Give back memory and connections; no call may run, and none may follow."""
        self._native.close()


def connect(settings: MooncakeSettings) -> MooncakeClient:
    """Set a client up; a master that is not there yet is waited for, ``setup_timeout_s`` at most.

    One that is there and does not answer takes one ``call_timeout_s`` to find out.

    Raises:
        StoreOpenError: there is none, what answers is no Mooncake master, it refuses this client,
            or the package is missing.
    """
    module = mooncake_module()
    if _pids and os.getpid() not in _pids:
        raise StoreOpenError(
            f"this process was forked from one ({_pids[0]}) that had used Mooncake, whose client"
            " does not survive that: start the process with spawn"
        )
    _set_environment(settings)
    deadline_s = time.monotonic() + settings.setup_timeout_s
    own_address = _own_address(settings, deadline_s)
    for _ in range(_SETUP_TRIES):
        native = module.MooncakeDistributedStore()
        _pids[:] = [os.getpid()]
        tried_at_s = time.monotonic()
        if _set_up(native, settings, settings.hostname or own_address) == OK:
            return MooncakeClient(native, settings)
        # A refusal at once may be of a port of our own that another client took just now.
        took_s = time.monotonic() - tried_at_s
        if took_s > _IS_REFUSED_FAST_S or time.monotonic() > deadline_s:
            break
    raise _refusal(settings, has_answered=took_s < _SHARE_OF_TIMEOUT * settings.call_timeout_s)


def _set_up(native: Any, settings: MooncakeSettings, hostname: str) -> int:  # noqa: ANN401
    tenant = {} if settings.tenant == DEFAULT_TENANT else {"tenant_id": settings.tenant}
    return int(
        native.setup(
            hostname,
            settings.metadata,
            settings.segment_bytes,
            settings.buffer_bytes,
            settings.protocol,
            settings.device,
            settings.master,
            **tenant,
        )
    )


def _set_environment(settings: MooncakeSettings) -> None:
    """Tell the client what it reads from the environment alone; what the operator set stays.

    By default a call waits 30 s for a master or an owner that hangs, and set-up tries 20 times.
    A TCP peer takes 2,048 segments at a time, beyond which keys fail: three threads of kvtide
    that call at once would pass that.
    """
    transfer_timeout_s = max(1, min(round(settings.call_timeout_s), MAX_TRANSFER_TIMEOUT_S))
    for name, value in (
        ("MC_STORE_CLIENT_SETUP_RETRIES", 1),
        ("MC_RPC_TIMEOUT_MS", round(1000 * settings.call_timeout_s)),
        ("MC_TCP_STATUS_TIMEOUT_SEC", transfer_timeout_s),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", transfer_timeout_s),
        ("MC_TCP_LANES_PER_PEER", TCP_LANES),
        ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", 16384),
        ("MC_LOG_LEVEL", "WARNING"),
    ):
        if os.environ.get(name) in (None, _set_before.get(name)):
            os.environ[name] = _set_before[name] = str(value)


_pids: list[int] = []
"""The process that made a client: a child forked from it would hang in making one."""
_set_before: dict[str, str] = {}
"""What this process's last client was told: it is not the operator's, and the next may differ."""


def _own_address(settings: MooncakeSettings, give_up_at_s: float) -> str:
    """Wait until something listens where the master should; return from which address it is seen.

    Raises:
        StoreOpenError: nothing does.
    """
    while True:
        try:
            with _dial(settings, max(0.1, give_up_at_s - time.monotonic())) as connection:
                return str(connection.getsockname()[0])
        except (socket.gaierror, UnicodeError) as error:
            raise StoreOpenError(
                f"the Mooncake master's host {settings.master_host!r} is not known here"
                f" ({getattr(error, 'strerror', error)}): correct {settings.source}"
            ) from error
        except OSError as error:
            if time.monotonic() + _POLL_S > give_up_at_s:
                raise StoreOpenError(
                    f"no Mooncake master listens at {settings.master} ({error.strerror or error}):"
                    f" start it (for development: kvtide pool up), or correct {settings.source}"
                ) from error
        time.sleep(_POLL_S)


def _dial(settings: MooncakeSettings, timeout_s: float) -> socket.socket:
    address = settings.master_host, settings.master_port
    return socket.create_connection(address, timeout=timeout_s)


def _refusal(settings: MooncakeSettings, *, has_answered: bool) -> StoreOpenError:
    if not has_answered:
        return StoreOpenError(
            f"what listens at {settings.master} does not answer as a Mooncake master: the port in"
            f" {settings.source} must be the master's rpc_port, not that of its metrics or of"
            " another service"
        )
    return StoreOpenError(
        f"the Mooncake master at {settings.master} refuses this client: most likely it is of"
        " another version than the package installed here (its line 'Version mismatch' above says"
        " so); install the same version on both sides. Else the client's lines above tell why"
    )
