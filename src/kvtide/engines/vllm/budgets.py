"""The configured sizes in the core's terms: tokens, blocks and jobs of this model."""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.config import PoolConfig
from kvtide.core.admission import AdmissionLimits
from kvtide.core.back_off import Delays
from kvtide.core.coordinator import Coordinator
from kvtide.core.layout import StoreLayout
from kvtide.core.save_limits import SaveLimits
from kvtide.engines.vllm.translate import GroupPlan
from kvtide.errors import ConfigError
from kvtide.runtime.values import ValueFormat
from kvtide.units import format_size

JOB_SHARE_OF_STAGING = 4
"""A job takes at most this fraction of a worker's staging memory, so that jobs overlap."""
MAX_JOB_VALUES = 512
"""A job stores at most so many: what fails, or waits to be staged, comes in small portions."""


class Budgets:
    """What a configuration lets saving and loading hold, for ranks of these ``layouts``.

    Raises:
        ConfigError: a size is below one block of this model.
    """

    def __init__(
        self,
        config: PoolConfig,
        plan: GroupPlan,
        layouts: Sequence[StoreLayout],
        values: ValueFormat,
    ) -> None:
        self._config = config
        self._plan = plan
        self._coordinator = coordinator = plan.coordinator()
        self._unit_bytes = max(_bytes_per_unit(coordinator, layout, values) for layout in layouts)
        self._most_values = max(
            group.values_per_block for layout in layouts for group in layout.groups
        )
        _check_sizes(config, self._unit_bytes)

    def save_limits(self, num_blocks: int, *, puts_off: bool = True) -> SaveLimits:
        """Return the limits of saving in an engine of ``num_blocks`` blocks.

        One that ``puts_off`` decodes saves them in portions, where that is configured.
        """
        config, coordinator = self._config, self._coordinator
        unit = coordinator.lcm_block_size
        units = config.staging_size // self._unit_bytes
        values_per_unit = max(1, coordinator.max_stored_per_unit * self._most_values)
        job_units = min(MAX_JOB_VALUES // values_per_unit, units // JOB_SHARE_OF_STAGING)
        return SaveLimits(
            max_pinned_blocks=int(config.pin_fraction * num_blocks),
            max_job_tokens=unit * max(1, job_units),
            max_open_tokens=unit * units,
            delays=Delays(config.backoff_s, config.max_backoff_s),
            decode_job_tokens=config.decode_portion_tokens if puts_off else 0,
        )

    def admission_limits(self, num_blocks: int) -> AdmissionLimits:
        """Return the limits of looking up and loading in an engine of ``num_blocks`` blocks."""
        config, unit = self._config, self._coordinator.lcm_block_size
        return AdmissionLimits(
            lookup_wait_s=config.lookup_wait_ms / 1000,
            max_loads=config.max_loads_in_flight,
            max_load_tokens=config.max_load_bytes // self._unit_bytes * unit,
            num_blocks=num_blocks,
            max_step_tokens=self._plan.max_step_tokens,
            min_load_tokens=config.min_load_tokens,
            delays=Delays(config.backoff_s, config.max_load_backoff_s),
        )


def _check_sizes(config: PoolConfig, unit_bytes: int) -> None:
    """Refuse budgets that not even one block of this model fits into: nothing would ever move.

    Raises:
        ConfigError: names each such setting, and what it needs.
    """
    faults = [
        f"{name} is {format_size(size)}, but one block of this model takes "
        f"{format_size(unit_bytes)}: set it to {format_size(JOB_SHARE_OF_STAGING * unit_bytes)} "
        "or more"
        for name, size in (
            ("staging_size", config.staging_size),
            ("max_load_bytes", config.max_load_bytes),
        )
        if size < unit_bytes
    ]
    if faults:
        raise ConfigError(faults)


def _bytes_per_unit(coordinator: Coordinator, layout: StoreLayout, values: ValueFormat) -> int:
    """Return the staging bytes of ``lcm_block_size`` tokens over all groups, on one rank."""
    unit = coordinator.lcm_block_size
    return sum(
        unit // group.block_size * held.values_per_block * values.row_bytes(held.payload_bytes)
        for group, held in zip(coordinator.groups, layout.groups, strict=True)
    )
