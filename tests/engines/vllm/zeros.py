"""The control of a comparison of tokens: an engine that loads zeros instead of what is stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvtide.engines.vllm.tensors import TensorBlocks
from tests.engines.vllm.engines import InProcessEngine

_write = TensorBlocks.write


def _write_zeros(blocks: TensorBlocks, group_id: int, block_ids: Any, data: Any) -> None:
    _write(blocks, group_id, block_ids, np.zeros_like(data))


def _start(_worker: Any) -> None:
    TensorBlocks.write = _write_zeros  # type: ignore[method-assign]


def _stop(_worker: Any) -> None:
    TensorBlocks.write = _write  # type: ignore[method-assign]


@contextmanager
def zeros_loaded(one: InProcessEngine) -> Iterator[None]:
    """Let all ranks of an engine, which may be processes of their own, load zeros."""
    one.core.model_executor.collective_rpc(_start)
    try:
        yield
    finally:
        one.core.model_executor.collective_rpc(_stop)
