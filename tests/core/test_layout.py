"""Regions and layouts."""

import pytest

from kvtide.core.layout import GroupLayout, Region, StoreLayout, common_layout


def test_a_region_contains_what_lies_wholly_inside() -> None:
    """Its end belongs to somebody else."""
    region = Region(100, 50)
    assert region.end == 150
    assert region.contains(100, 50)
    assert not region.contains(100, 51)
    assert not region.contains(99, 10)


@pytest.mark.parametrize("address, num_bytes", [(-1, 10), (0, 0)])
def test_a_region_of_nothing_is_refused(address: int, num_bytes: int) -> None:
    """Registering it would hide a mistake."""
    with pytest.raises(ValueError, match="region"):
        Region(address, num_bytes)


def test_ranks_agree_or_there_is_no_common_layout() -> None:
    """Bytes are exchangeable only between equal layouts."""
    one = StoreLayout((GroupLayout(16, (100, 200), "HND"), GroupLayout(32, (50,), "HND")))
    other = StoreLayout((GroupLayout(16, (200, 100), "HND"), GroupLayout(32, (50,), "HND")))
    assert one.groups[0].payload_bytes == 300
    assert common_layout([one, one]) == one
    assert common_layout([one, other]) is None
    assert common_layout([]) is None
    assert one.describe() != other.describe()


def test_engines_exchange_values_however_many_of_them_a_rank_has() -> None:
    """Ranks of one engine must hold equally many parts of a block; two engines need not."""
    one, two = (
        StoreLayout((GroupLayout(16, (100, 200), "HND", values_per_block=count),))
        for count in (1, 2)
    )
    assert one.describe() == two.describe()
    assert common_layout([one, two]) is None
