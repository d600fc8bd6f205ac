"""What a namespace covers, and who has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.config import PoolConfig
from kvtide.core.keys import CacheIdentity, namespace_for
from kvtide.engines.lora import PENDING, AdapterDigests
from kvtide.engines.vllm.formats import FORMATS
from kvtide.engines.vllm.names import IdentityNames, ModelNames
from kvtide.errors import ConfigError
from tests.engines.test_lora import wait_for

ENGINE = {"weights": "w"}
LAYOUT = [[16, [4096], "bytes"]]


def adapter(path: str = "/adapters/a") -> Any:
    """A request's adapter."""
    return SimpleNamespace(lora_int_id=1, lora_path=path)


def test_an_identity_s_name_covers_engine_layout_and_adapter() -> None:
    """The base model's is known at once, an adapter's once it was read."""
    names = IdentityNames("prod", ENGINE, "")
    names.adapters = AdapterDigests(digest=lambda path: path.upper())
    names.agree_on(LAYOUT)
    assert names.namespace_of(None) == namespace_for("prod", CacheIdentity(ENGINE, LAYOUT))
    assert names.namespace_of(adapter()) is PENDING
    wait_for(lambda: names.namespace_of(adapter()) is not PENDING)
    identity = CacheIdentity(ENGINE, LAYOUT, adapter="/ADAPTERS/A")
    assert names.namespace_of(adapter()) == namespace_for("prod", identity)
    names.close()


def test_an_adapter_that_cannot_be_told_has_no_name() -> None:
    """Such a request neither saves nor loads."""
    names = IdentityNames("", ENGINE, "")
    names.adapters = AdapterDigests(digest=lambda _: None)
    names.agree_on(LAYOUT)
    wait_for(lambda: names.namespace_of(adapter()) is None)
    names.close()
    names.close()


def test_a_reset_takes_another_name_and_a_file_says_which(tmp_path: Path) -> None:
    """Two engines that read the same name go on sharing."""
    version = tmp_path / "version"
    version.write_text("r1")
    one, other, alone = (
        IdentityNames("", ENGINE, text) for text in (f"@{version}", f"@{version}", "r1")
    )
    assert one.namespace_of(None) == other.namespace_of(None) == alone.namespace_of(None)
    before = one.namespace_of(None)
    version.write_text("r2")
    for names in (one, other, alone):
        names.change()
    assert one.namespace_of(None) == other.namespace_of(None) != before
    assert len({names.namespace_of(None) for names in (one, other, alone)}) == 2
    with pytest.raises(ConfigError, match="weights_version names the file"):
        IdentityNames("", ENGINE, f"@{tmp_path / 'missing'}")


def test_a_model_s_name_is_the_same_in_whatever_layout() -> None:
    """Only a reset ends it, and only for this engine."""
    names = ModelNames("", "org/model-7b")
    names.agree_on(LAYOUT)
    assert names.namespace_of(None) == "model-7b"
    assert names.namespace_of(adapter()) is None
    names.change()
    assert names.namespace_of(None) is None
    names.close()
    assert ModelNames("", "org/model-7b").namespace_of(None) == "model-7b"


def test_names_follow_from_vllm_s_configuration(
    make_config: Callable[..., Any], tmp_path: Path
) -> None:
    """In vllm's format neither weights nor settings are read: they are no part of it."""
    from tests.engines.model_folders import make_folder

    config = make_config(make_folder(tmp_path / "models" / "final"), load_format="dummy")
    options = PoolConfig.from_mapping({"key_format": "vllm", "cache_prefix": "prod"})
    names = FORMATS["vllm"].names(options, config, None)  # type: ignore[arg-type]
    assert names.namespace_of(None) == "prod@final"
