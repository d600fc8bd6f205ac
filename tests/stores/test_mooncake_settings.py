"""Mooncake settings: URLs and vLLM's files, with every fault named at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtide.errors import ConfigError
from kvtide.stores import mooncake_settings
from kvtide.stores.mooncake_settings import CONFIG_VARIABLE, MooncakeSettings, read_settings
from kvtide.stores.url import StoreUrl

GIB = 1 << 30
MASTER = {"metadata_server": "P2PHANDSHAKE", "master_server_address": "10.0.0.1:50051"}


def read(url: str) -> MooncakeSettings:
    """Return the settings that a URL means."""
    return read_settings(StoreUrl.parse(url))


@pytest.fixture(autouse=True)
def no_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without RDMA, whose devices a test may add; and no configuration file."""
    folder = tmp_path / "infiniband"
    monkeypatch.setattr(mooncake_settings, "_RDMA_DEVICES", folder)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    return folder


def test_an_address_is_enough() -> None:
    """An address is enough."""
    settings = read("mooncake://pool.example:50051")
    assert settings == MooncakeSettings("pool.example", 50051)
    assert (settings.protocol, settings.segment_bytes, settings.tenant) == ("tcp", 0, "default")
    assert settings.master == "pool.example:50051"


def test_an_ipv6_address_loses_its_brackets_for_the_socket_alone() -> None:
    """An ipv6 address loses its brackets for the socket alone."""
    settings = read("mooncake://[::1]:50051")
    assert settings.master_host == "::1"
    assert settings.master == "[::1]:50051"


def test_every_parameter_is_read(no_devices: Path) -> None:
    """Every parameter is read."""
    (no_devices / "mlx5_0").mkdir(parents=True)
    settings = read(
        "mooncake://h:1?protocol=rdma&metadata=http://m:8080/metadata&device=mlx5_0&segment=32MiB"
        "&buffer=512MiB&tenant=blue&preferred_segment=h:2&replicas=2&hostname=10.0.0.7"
        "&setup_timeout_ms=2500&call_timeout_ms=1500"
    )
    assert settings == MooncakeSettings(
        "h",
        1,
        metadata="http://m:8080/metadata",
        protocol="rdma",
        device="mlx5_0",
        segment_bytes=32 << 20,
        buffer_bytes=512 << 20,
        tenant="blue",
        preferred_segment="h:2",
        num_replicas=2,
        hostname="10.0.0.7",
        setup_timeout_s=2.5,
        call_timeout_s=1.5,
    )


@pytest.mark.parametrize(
    "url,said",
    [
        ("mooncake://h", ["HOST:PORT"]),
        ("mooncake://h:0", ["HOST:PORT"]),
        ("mooncake://h:65536", ["HOST:PORT"]),
        ("mooncake://h:http", ["HOST:PORT"]),
        ("mooncake://:50051", ["HOST:PORT"]),
        ("mooncake://h:1/pool", ["no path", "mooncake://h:1"]),
        ("mooncake://h:1?protocol=udp", ["'udp'", "tcp, rdma"]),
        ("mooncake://h:1?segments=1GiB", ["'segments'", "did you mean 'segment'?"]),
        ("mooncake://h:1?segment=1G", ["ambiguous", "1GiB"]),
        ("mooncake://h:1?segment=1000TiB", ["more than the", "free here"]),
        ("mooncake://h:1?buffer=0", ["'buffer'", "positive"]),
        ("mooncake://h:1?replicas=0", ["'replicas'", "from 1 to 16"]),
        ("mooncake://h:1?replicas=many", ["'replicas'"]),
        ("mooncake://h:1?setup_timeout_ms=soon", ["'setup_timeout_ms'", "milliseconds"]),
        ("mooncake://h:1?protocol=rdma", ["device=mlx5_0", "device=auto", "none"]),
        ("mooncake://h:1?protocol=rdma&device=mlx5_0", ["no RDMA device", "protocol=tcp"]),
        ("mooncake://h:1?segment=1MiB", ["less than Mooncake takes", "16MiB"]),
        ("mooncake://h:1?buffer=900TiB", ["a buffer", "free here"]),
        ("mooncake://h:1?metadata=redis://h:1", ["metadata service", "P2PHANDSHAKE"]),
        ("mooncake://h:1?tenant=bl%C3%BC", ["tenant has characters"]),
        ("mooncake://me:secret@h:1", ["no user or password"]),
        ("mooncake:///dev/null", ["/dev/null", "no file"]),
        ("mooncake://", ["HOST:PORT", CONFIG_VARIABLE]),
        ("mooncake:///nowhere/mooncake.json", ["/nowhere/mooncake.json", "cannot be read"]),
    ],
)
def test_what_is_wrong_is_said_with_the_remedy(url: str, said: list[str]) -> None:
    """What is wrong is said with the remedy."""
    with pytest.raises(ConfigError) as caught:
        read(url)
    assert len(caught.value.faults) == 1
    for words in said:
        assert words in str(caught.value)


def test_all_faults_are_said_at_once() -> None:
    """All faults are said at once."""
    with pytest.raises(ConfigError) as caught:
        read("mooncake://h?protocol=udp&replicas=0&port=3")
    assert len(caught.value.faults) == 4


def test_an_rdma_device_that_is_not_here_is_refused(no_devices: Path) -> None:
    """An rdma device that is not here is refused."""
    (no_devices / "mlx5_0").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no mlx5_9, but mlx5_0"):
        read("mooncake://h:1?protocol=rdma&device=mlx5_0,mlx5_9")


def test_device_auto_leaves_the_choice_to_mooncake(no_devices: Path) -> None:
    """Device auto leaves the choice to Mooncake."""
    (no_devices / "mlx5_0").mkdir(parents=True)
    assert read("mooncake://h:1?protocol=rdma&device=auto").device == ""


class TestFiles:
    """JSON files as vLLM's connector reads them."""

    @pytest.fixture
    def write(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The file that the variable names."""
        path = tmp_path / "mooncake.json"
        monkeypatch.setenv(CONFIG_VARIABLE, str(path))
        return path

    def test_an_owner_elsewhere(self, write: Path) -> None:
        write.write_text(
            json.dumps(
                MASTER | {"protocol": "tcp", "mode": "standalone-store", "global_segment_size": 0}
            )
        )
        expected = MooncakeSettings("10.0.0.1", 50051)
        assert read("mooncake://") == expected
        assert read(f"mooncake://{write}") == expected

    def test_sizes_are_powers_of_1024(self, write: Path) -> None:
        write.write_text(json.dumps(MASTER | {"protocol": "tcp", "global_segment_size": "0.5GB"}))
        assert read("mooncake://").segment_bytes == GIB // 2

    def test_an_engine_that_gives_memory_gives_4_gib_unless_told(
        self, write: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mooncake_settings, "available_memory_bytes", lambda: 8 * GIB)
        write.write_text(json.dumps(MASTER | {"protocol": "tcp"}))
        assert read("mooncake://").segment_bytes == 4 * GIB

    def test_rdma_is_what_vllm_takes_and_the_device_is_mooncakes_choice(
        self, write: Path, no_devices: Path
    ) -> None:
        (no_devices / "mlx5_0").mkdir(parents=True)
        write.write_text(
            json.dumps(MASTER | {"mode": "standalone-store", "global_segment_size": 0})
        )
        settings = read("mooncake://")
        assert (settings.protocol, settings.device) == ("rdma", "")

    def test_the_url_wins(self, write: Path) -> None:
        write.write_text(json.dumps(MASTER | {"protocol": "rdma", "tenant_id": " red "}))
        settings = read("mooncake://?protocol=tcp&segment=0")
        assert (settings.protocol, settings.segment_bytes, settings.tenant) == ("tcp", 0, "red")

    @pytest.mark.parametrize(
        "data,said",
        [
            ([], "not a JSON object"),
            ({}, "HOST:PORT"),
            (MASTER | {"protocol": "tcp", "mode": "both"}, "'both'"),
            (
                MASTER
                | {"protocol": "tcp", "mode": "standalone-store", "global_segment_size": GIB},
                "needs global_segment_size 0",
            ),
            (MASTER | {"protocol": "tcp", "global_segment_size": "lots"}, "'lots'"),
            (MASTER | {"protocol": "tcp", "global_segment_size": "9" * 500 + "GB"}, "a size"),
            (MASTER | {"protocol": "tcp", "global_segment_size": 10**400}, "a size"),
            (MASTER | {"protocol": "tcp", "global_segment_size": "1kb"}, "less than"),
            (MASTER | {"protocol": "tcp", "metadata_server": "etcd://h:1"}, "metadata service"),
        ],
    )
    def test_faults_name_the_file_or_the_entry(
        self, write: Path, data: object, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mooncake_settings, "available_memory_bytes", lambda: 8 * GIB)
        write.write_text(json.dumps(data))
        with pytest.raises(ConfigError, match=said):
            read("mooncake://?protocol=tcp")

    @pytest.mark.parametrize("text", ["{", "[" * 100_000])
    def test_no_json_is_said(self, write: Path, text: str) -> None:
        write.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            read("mooncake://")
