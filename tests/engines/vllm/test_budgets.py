"""The configured sizes become tokens, blocks and jobs of a model."""

from __future__ import annotations

import pytest

from kvtide.config import PoolConfig
from kvtide.core.layout import GroupLayout, StoreLayout
from kvtide.engines.vllm.budgets import MAX_JOB_VALUES, Budgets
from kvtide.errors import ConfigError
from kvtide.runtime.values import BARE
from tests.engines.vllm.test_scheduler_side import PLAN

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def budgets(*block_bytes: int, **options: object) -> Budgets:
    """Budgets of ranks with blocks of so many bytes."""
    layouts = [StoreLayout((GroupLayout(16, (each,), "bytes"),)) for each in block_bytes]
    return Budgets(PoolConfig.from_mapping(options), PLAN, layouts, BARE)


def test_sizes_are_told_in_blocks_of_the_largest_rank() -> None:
    """A job takes a quarter of the staging memory; loads take what they may hold."""
    one = budgets(1 << 20, 2 << 20, staging_size="64MiB", max_load_bytes="128MiB")
    saves, admission = one.save_limits(1000), one.admission_limits(1000)
    assert saves.max_open_tokens == 32 * 16
    assert saves.max_job_tokens == 8 * 16
    assert admission.max_load_tokens == 64 * 16
    assert admission.num_blocks == 1000


def test_pins_are_a_share_of_the_engines_blocks() -> None:
    """As configured."""
    assert budgets(4096, pin_fraction=0.25).save_limits(1000).max_pinned_blocks == 250


def test_small_blocks_come_in_jobs_of_a_bounded_number_of_values() -> None:
    """However many of them staging could take."""
    saves = budgets(4096).save_limits(1000)
    assert saves.max_job_tokens == MAX_JOB_VALUES * 16


def test_decodes_are_put_off_only_where_that_is_configured_and_steps_follow() -> None:
    """By default each block is saved as it is complete."""
    assert not budgets(4096).save_limits(1000).decode_job_tokens
    portions = budgets(4096, decode_portion_tokens=128)
    assert portions.save_limits(1000).decode_job_tokens == 128
    assert not portions.save_limits(1000, puts_off=False).decode_job_tokens


def test_a_block_that_hardly_fits_may_still_be_a_job() -> None:
    """A quarter of the staging memory is less than one."""
    assert budgets(1 << 20, staging_size="2MiB").save_limits(1000).max_job_tokens == 16


def test_sizes_below_one_block_are_refused_together() -> None:
    """Nothing would ever be saved or loaded, and nothing would say why."""
    with pytest.raises(ConfigError) as refused:
        budgets(4 << 20, staging_size="1MiB", max_load_bytes="1MiB")
    assert [fault.split(" is ")[0] for fault in refused.value.faults] == [
        "staging_size",
        "max_load_bytes",
    ]
