"""The namespaces of requests' keys, and which requests have none and go without the pool."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvtide.core.keys import CacheIdentity, namespace_for, vllm_namespace
from kvtide.engines.deployment import Deployment
from kvtide.engines.lora import AdapterDigests, Pending
from kvtide.engines.vllm.identity import adapter_identity, of_all_sizes

logger = logging.getLogger(__name__)


class Names(Protocol):
    """Namespaces by a request's adapter. Used on vLLM's scheduling thread: no I/O, no wait."""

    def agree_on(self, layout: object, shards: Sequence[int] | None = None) -> None:
        """Take the memory layout (JSON data) of all ranks; before that nothing is asked.

        With ``shards`` of each group's heads, engines of other tensor parallel sizes get the same
        names.
        """

    def namespace_of(self, lora_request: Any) -> str | Pending | None:
        """Return the namespace of a request's keys; ``None`` where it must neither save nor load.

        ``PENDING`` while that is not known yet.
        """

    def change(self) -> bool:
        """Leave everything stored so far behind: the weights may have changed.

        False where there is no other name for them.
        """

    def close(self) -> None:
        """Stop what finds names out; may be called twice."""


class IdentityNames:
    """Names that cover all that decides what the bytes are: kvtide's own.

    ``engine`` is the engine part of the identity. ``weights_version`` is the option.

    Raises:
        ConfigError: the file of the weights' name cannot be read.
    """

    def __init__(
        self, cache_prefix: str, engine: Mapping[str, object], weights_version: str
    ) -> None:
        self._cache_prefix = cache_prefix
        self._engine = self._own_engine = engine
        self._worker: object = None
        self._deployment = Deployment(weights_version)
        self._known: dict[str, str] = {}
        self.adapters = AdapterDigests()

    def agree_on(self, layout: object, shards: Sequence[int] | None = None) -> None:
        """Take the worker part of the identity, and with whom it is shared."""
        own = self._own_engine
        self._engine = own if shards is None else of_all_sizes(own, shards)
        self._worker = layout
        self._known.clear()

    def namespace_of(self, lora_request: Any) -> str | Pending | None:
        """Return the namespace of an adapter's contents; ``None`` where they cannot be told."""
        adapter = adapter_identity(self.adapters, lora_request)
        if not isinstance(adapter, str):
            return adapter
        if adapter not in self._known:
            identity = CacheIdentity(
                engine=self._engine,
                worker=self._worker,
                deployment=self._deployment.name,
                adapter=adapter,
            )
            self._known[adapter] = namespace_for(self._cache_prefix, identity)
        return self._known[adapter]

    def change(self) -> bool:
        """Take another name for the weights."""
        self._deployment.change()
        self._known.clear()
        return True

    def close(self) -> None:
        """Stop reading adapters."""
        self.adapters.close()


class ModelNames:
    """The name of vLLM's in-tree connector: the operator's prefix and the end of the model's path.

    It cannot say which adapter or which weights, so requests with an adapter go without the pool,
    and so does everything once the weights may have changed.
    """

    def __init__(self, cache_prefix: str, model: str) -> None:
        self._name: str | None = vllm_namespace(cache_prefix, model)
        self._has_told_of_adapters = False
        logger.warning(
            "key_format is 'vllm': the pool's keys name this model %r and say nothing of its "
            "weights, its dtype or vLLM's settings, and its values carry no checksum. Whoever "
            "shares the pool under that name must serve the same weights with the same settings: "
            "see docs/moving-from-vllm-mooncake.md",
            self._name,
        )

    def agree_on(self, layout: object, shards: Sequence[int] | None = None) -> None:
        """Do nothing: neither is part of the name."""

    def namespace_of(self, lora_request: Any) -> str | None:
        """Return the model's name; ``None`` for a request with an adapter, and after a reset."""
        if lora_request is None:
            return self._name
        if not self._has_told_of_adapters:
            self._has_told_of_adapters = True
            logger.warning(
                "key_format is 'vllm', whose keys cannot tell what an adapter's weights are: "
                "requests with an adapter neither save nor load (unnamed_requests counts them)"
            )
        return None

    def change(self) -> bool:
        """Use the pool no more: it may hold the old weights' KV cache under the only name."""
        if self._name is not None:
            logger.warning(
                "the cache was reset, so the weights may have changed, and keys of key_format "
                "'vllm' cannot name other weights: nothing is saved or loaded any more until this "
                "engine is restarted (unnamed_requests counts what goes without)"
            )
        self._name = None
        return False

    def close(self) -> None:
        """Do nothing."""
