"""A model of 32 layers over Mooncake's TCP: a value has 32 segments, and a load thousands.

A TCP peer takes 2,048 segments at a time and refuses what comes beyond. vLLM's own connector hands
the segments over one by one, and its load of this prompt fails. ``python -m
tests.engines.vllm.in_tree_scenario FOLDER`` shows it, with vLLM 0.32.0 and Mooncake 0.3.13; the
187 chunks are all saved before:

- As it is by default, in three of three runs: "Failed to get 121 Mooncake keys from sub-batch
  (batch_keys=187 ...)", each with the code -800, then "Failing 1 request(s) due to KV load
  failure": the request ends without any token.
- With ``kv_load_failure_policy: recompute``, in four of six runs: "Failed to complete transfers
  after 60000 milliseconds", and from then on all 187 keys fail about once a second, "Recovered from
  KV load failure: 1 request(s) rescheduled (5984 tokens affected)" each time, with no answer within
  90 s. In the other two a second load brought what the first had not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.engines import BLOCK, engine, prompt_of
from tests.engines.vllm.family_runs import zeroed_loads
from tests.engines.vllm.models import build
from tests.engines.vllm.pools import SharedMooncake

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PROMPT = prompt_of(6000)
WHOLE_BLOCKS = len(PROMPT) // BLOCK
SETTINGS: dict[str, Any] = {"max_model_len": 6144, "max_num_batched_tokens": 2048}


def test_a_long_prompt_of_32_layers_is_loaded_in_full(
    tmp_path: Path, mooncake: SharedMooncake
) -> None:
    """All 187 whole blocks of 6,000 tokens in one load, none of which fails; equal tokens."""
    model, url = build("llama-32", tmp_path), mooncake.emptied()
    with engine(model, None, **SETTINGS) as plain:
        [want] = plain.generate(PROMPT)
    with engine(model, url, **SETTINGS) as cold:
        assert cold.generate(PROMPT) == [want]
        cold.settle()
        assert cold.counters["saved_chunks"] == WHOLE_BLOCKS == 187
    with engine(model, url, **SETTINGS) as warm:
        [output] = warm.run(PROMPT)
        assert list(output.outputs[0].token_ids) == want
        assert output.num_cached_tokens == WHOLE_BLOCKS * BLOCK == 5984
        warm.settle()
        counters = warm.counters
        assert (counters["load_jobs"], counters["failed_loads"]) == (1, 0)
        assert counters["loaded_chunks"] == WHOLE_BLOCKS
        warm.forget_local()
        with zeroed_loads({0}):
            assert warm.generate(PROMPT) != [want], "the tokens depend on what is loaded"
