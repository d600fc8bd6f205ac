"""The families of models that kvtide is tried with, and what is expected of each.

A prompt is computed in steps of :data:`STEP` tokens, and :data:`HIT` of it are loaded. That is a
multiple of every block size here and of the step, so cold and warm compute the rest alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.engines.vllm.engines import prompt_of

STEP = 160
HIT = 480
SHARED = 400
"""What the prompt and the one that shares only a part of it have in common."""
NUM_OUTPUT_TOKENS = 40

# The rotary kernel of vLLM 0.32's CPU build answers wrongly where queries and keys come with a
# dimension for heads, as in these models: tokens then depend on how a prompt is cut into steps, and
# differ from transformers'. Computed by torch they are equal, for any cut.
_ROTARY_IN_TORCH = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}


@dataclass(frozen=True, slots=True)
class Family:
    """A model, how an engine runs it, and what is to be seen.

    ``groups`` are kinds of the core with the engine's block sizes, in the engine's order.
    ``loaded_chunks`` is what a hit at :data:`HIT` loads of each group. ``partial_hit`` is the hit
    of a prompt that shares its first :data:`SHARED` tokens, ``turn_hit`` that of the
    conversation's next turn. ``num_decoded``: so many generated tokens are part of the prompt that
    is asked again.
    """

    model: str
    groups: tuple[tuple[str, int], ...]
    loaded_chunks: tuple[int, ...]
    partial_hit: int
    turn_hit: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_prompt_tokens: int = HIT + 1
    num_decoded: int = 0

    @property
    def arguments(self) -> dict[str, Any]:
        """What an engine is started with, on every side of a comparison."""
        return {"max_num_batched_tokens": STEP, **self.settings}

    @property
    def kinds(self) -> list[str]:
        """The kinds of groups, each once."""
        return sorted({kind for kind, _ in self.groups})

    @property
    def loaded_places(self) -> list[str]:
        """The chunks below :data:`HIT` that are loaded, each as ``"group/chunk"``."""
        return [
            f"{index}/{chunk}"
            for index, (_, block_size) in enumerate(self.groups)
            for chunk in range(HIT // block_size)[-self.loaded_chunks[index] :]
        ]

    @property
    def first(self) -> list[int]:
        """The prompt that is computed and saved."""
        return prompt_of(self.num_prompt_tokens, seed=1)

    def again(self, output: list[int]) -> list[int]:
        """The prompt that is loaded, after which the rest of ``output`` must follow."""
        return self.first + output[: self.num_decoded]

    @property
    def partial(self) -> list[int]:
        """A prompt that shares its beginning only."""
        return self.first[:SHARED] + prompt_of(100, seed=2)

    def turn(self, output: list[int]) -> list[int]:
        """The next turn of the conversation."""
        return self.first + output + prompt_of(40, seed=3)


def _every(interval: int) -> dict[str, int]:
    """Keep windows and states at these boundaries; by default vLLM keeps only the prompt's end."""
    return {"prefix_cache_retention_interval": interval}


FAMILIES = [
    Family("llama", (("FullAttention", 32),), (15,), partial_hit=384, turn_hit=512),
    Family(
        "gemma3",
        (*[("SlidingWindow", 32)] * 3, ("FullAttention", 32)),
        (4, 4, 4, 15),
        partial_hit=320,
        turn_hit=480,
        settings=_every(160),
    ),
    Family(
        "gpt-oss",
        (("SlidingWindow", 32), ("FullAttention", 32)),
        (3, 15),
        partial_hit=320,
        turn_hit=480,
        settings=_every(160),
    ),
    Family(
        "llama4",
        (*[("ChunkedLocal", 32)] * 3, ("FullAttention", 32)),
        (3, 3, 3, 15),
        partial_hit=384,
        turn_hit=512,
    ),
    Family(
        "qwen3-next",
        (*[("Mamba", 96)] * 3, ("FullAttention", 96)),
        (1, 1, 1, 5),
        partial_hit=384,
        turn_hit=480,
        # The kernel of the gated delta net computes in bfloat16 and nothing else.
        settings={**_every(96), "dtype": "bfloat16"},
    ),
    Family(
        "lfm2",
        (("Mamba", 32), ("FullAttention", 32)),
        (1, 15),
        partial_hit=320,
        turn_hit=480,
        settings={**_every(160), **_ROTARY_IN_TORCH},
    ),
    Family(
        "falcon-h1",
        (("FullAttention", 160), ("Mamba", 160)),
        (3, 1),
        partial_hit=320,
        turn_hit=480,
        # A step that crosses a block boundary ends the engine: vLLM's Mamba2 wants to keep a state
        # from inside of a step, and the CPU kernel has none. Steps of one block never cross any.
        settings={**_every(160), "block_size": STEP},
    ),
    Family(
        "deepseek-v2",
        (("FullAttention", 16),),
        (30,),
        partial_hit=400,
        turn_hit=512,
        # Without AMX vLLM computes a prompt of an MLA model in one step. For equal steps on both
        # sides the prompt ends where the hit will end, and the next step has one token of output.
        settings={**_ROTARY_IN_TORCH, "max_num_batched_tokens": 1024},
        num_prompt_tokens=HIT,
        num_decoded=1,
    ),
]
BY_MODEL = {family.model: family for family in FAMILIES}
