"""kvtide's connector, but what it loads are zeros: the control of a comparison of tokens.

A module that engines load by its name, since their ranks are processes of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtide.engines.vllm import KVTideConnector
from kvtide.engines.vllm.tensors import TensorBlocks

__all__ = ["KVTideConnector"]

_write = TensorBlocks.write


def _write_zeros(blocks: TensorBlocks, group_id: int, block_ids: Any, data: Any) -> None:
    _write(blocks, group_id, block_ids, np.zeros_like(data))


TensorBlocks.write = _write_zeros  # type: ignore[method-assign]
