"""What names a model's weights: their content, never the name of their folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtide.engines import weights
from kvtide.engines.weights import default_hub_cache, weights_identity
from kvtide.errors import ConfigError
from tests.engines.model_folders import flip_byte, make_folder, random_tensors, write_safetensors

SHARD = "model-00002-of-00002.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"


def make_hub(cache: Path, commit: str = COMMIT, seed: int = 1, ref: str = "main") -> Path:
    """Make a downloaded snapshot in a hub cache as the hub's client lays it out."""
    repository = cache / "models--org--model"
    source = make_folder(cache / f"source-{seed}", seed)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / ref).write_text(commit)
    for file in source.iterdir():
        blob = repository / "blobs" / f"{seed}-{file.name}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_folders_of_one_name_with_different_weights_differ(tmp_path: Path) -> None:
    """Two models whose paths end alike are told apart by their weights."""
    first = make_folder(tmp_path / "a" / "llama", 1)
    second = make_folder(tmp_path / "b" / "llama", 2)
    assert weights_identity(str(first)) != weights_identity(str(second))


def test_a_copy_elsewhere_at_another_time_is_the_same_model(tmp_path: Path) -> None:
    """Neither the place, the name nor the time stamps of a folder count."""
    first = make_folder(tmp_path / "a")
    second = Path(shutil.copytree(first, tmp_path / "somewhere" / "else"))
    for file in second.iterdir():
        os.utime(file, (1, 1))
    assert weights_identity(str(first)) == weights_identity(str(second))
    assert weights_identity(f"{second}/") == weights_identity(str(first))


def test_files_that_are_no_model_do_not_count(tmp_path: Path) -> None:
    """A tokenizer, a readme or a hidden file leaves the identity as it is."""
    folder = make_folder(tmp_path / "a")
    before = weights_identity(str(folder))
    for name in ("README.md", "tokenizer.json", "generation_config.json", ".gitattributes"):
        (folder / name).write_text("{}")
    assert weights_identity(str(folder)) == before


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors.index.json",
        "quantize_config.json",
        "hf_quant_config.json",
        "modeling_own.py",
        "extra.bin",
    ],
)
def test_a_new_or_changed_file_of_the_model_changes_it(tmp_path: Path, name: str) -> None:
    """Configuration, quantisation settings, the index, own code and each shard all count."""
    folder = make_folder(tmp_path / "a")
    before = weights_identity(str(folder))
    (folder / name).write_text(json.dumps({"changed": True}))
    assert weights_identity(str(folder)) != before


def test_a_renamed_tensor_changes_it(tmp_path: Path) -> None:
    """The whole header is read: equal bytes under another tensor's name are another model."""
    folder = make_folder(tmp_path / "a")
    before = weights_identity(str(folder))
    tensors = random_tensors(102)
    renamed = {name.replace("layers.0", "layers.9"): data for name, data in tensors.items()}
    write_safetensors(folder / SHARD, renamed)
    assert weights_identity(str(folder)) != before


@settings(max_examples=24, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(number=st.integers(0, 7), end=st.sampled_from(["first", "middle", "last"]))
def test_a_changed_tensor_shows_wherever_it_lies(
    tmp_path_factory: pytest.TempPathFactory, number: int, end: str
) -> None:
    """Each tensor is sampled in its middle, and the shard at both ends."""
    size = 96 * 1024
    folder = make_folder(tmp_path_factory.mktemp("m") / "a")
    shard = folder / SHARD
    before = weights_identity(str(folder))
    data = shard.stat().st_size - 8 * size
    offset = {"first": data, "last": shard.stat().st_size - 1}.get(
        end, data + number * size + size // 2
    )
    flip_byte(shard, offset)
    assert weights_identity(str(folder)) != before


def test_shards_of_other_formats_are_sampled_evenly(tmp_path: Path) -> None:
    """A change of a whole region shows in a shard whose tensors are not known."""
    folder = tmp_path / "a"
    folder.mkdir()
    shard = folder / "pytorch_model.bin"
    shard.write_bytes(bytes(4 * 1024 * 1024))
    before = weights_identity(str(folder))
    with shard.open("r+b") as stream:
        stream.seek(2_000_000)
        stream.write(b"\1" * 70_000)
    assert weights_identity(str(folder)) != before


def test_a_shard_that_only_grew_changes_it(tmp_path: Path) -> None:
    """The size of each shard is part of the digest."""
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(bytes(2 * 1024 * 1024))
    before = weights_identity(str(folder))
    (folder / "model.gguf").write_bytes(bytes(2 * 1024 * 1024 + 1))
    assert weights_identity(str(folder)) != before


def test_a_single_file_is_a_model(tmp_path: Path) -> None:
    """A GGUF file is told by its content, under any name."""
    (tmp_path / "a.gguf").write_bytes(b"1" * 10_000)
    (tmp_path / "b.gguf").write_bytes(b"1" * 10_000)
    (tmp_path / "c.gguf").write_bytes(b"2" * 10_000)
    a, b, c = (weights_identity(str(tmp_path / f"{name}.gguf")) for name in "abc")
    assert a == b != c


def test_a_broken_header_is_no_crash(tmp_path: Path) -> None:
    """A file that is no safetensors file in spite of its name is sampled like any other."""
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"\xff" * 3_000_000)
    assert weights_identity(str(folder)).startswith("digest:")


def test_reading_is_bounded_however_large_the_model(tmp_path: Path) -> None:
    """Of a sparse 40 GB model of many tensors, some tens of megabytes are read."""
    folder = tmp_path / "a"
    folder.mkdir()
    size = 10 * 1024**3
    for number in range(4):
        tensors = {
            f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i * 1000, i * 1000 + 1000]}
            for i in range(20_000)
        }
        header = json.dumps(tensors).encode()
        path = folder / f"model-{number}.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(path, size)

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    before = bytes_read()
    weights_identity(str(folder))
    samples = weights.MAX_READS * weights.SAMPLE_BYTES
    assert samples <= 16 * 1024**2
    assert bytes_read() - before < samples + 4 * (len(header) + 4 * weights.END_BYTES)


def test_a_repository_id_becomes_its_commit(tmp_path: Path) -> None:
    """A hub id is looked up in the local cache by its branch, and needs no network."""
    make_hub(tmp_path)
    assert weights_identity("org/model", hub_cache=tmp_path) == f"commit:{COMMIT}"
    assert weights_identity("org/model", "main", hub_cache=tmp_path) == f"commit:{COMMIT}"


def test_a_path_into_a_snapshot_is_the_same_as_its_repository_id(tmp_path: Path) -> None:
    """VLLM turns ids into paths when it is offline: both name one model."""
    snapshot = make_hub(tmp_path)
    assert weights_identity(str(snapshot)) == weights_identity("org/model", hub_cache=tmp_path)


def test_two_revisions_differ(tmp_path: Path) -> None:
    """Two revisions of one repository are two models, by branch or by commit."""
    make_hub(tmp_path)
    make_hub(tmp_path, OTHER, seed=2, ref="dev")
    main = weights_identity("org/model", hub_cache=tmp_path)
    assert weights_identity("org/model", "dev", hub_cache=tmp_path) == f"commit:{OTHER}" != main
    assert weights_identity("org/model", OTHER, hub_cache=tmp_path) == f"commit:{OTHER}"


def test_a_snapshot_that_was_tampered_with_is_not_its_commit(tmp_path: Path) -> None:
    """A file put in the place of the cache's own link makes the folder a local one."""
    snapshot = make_hub(tmp_path)
    shard = snapshot / SHARD
    data = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(data[:-1] + b"\0")
    for model in (str(snapshot), "org/model"):
        assert weights_identity(model, hub_cache=tmp_path).startswith("digest:")


def test_files_of_one_snapshot_are_different_models(tmp_path: Path) -> None:
    """A repository of quantised files holds several models under one commit."""
    snapshot = make_hub(tmp_path)
    first, second = sorted(snapshot.glob("*.safetensors"))
    assert weights_identity(str(first)) != weights_identity(str(second))
    q4 = weights_identity("org/model:Q4_K_M", hub_cache=tmp_path)
    assert q4 != weights_identity("org/model:Q8_0", hub_cache=tmp_path)


def test_the_operators_version_wins(tmp_path: Path) -> None:
    """``weights_version`` needs no files, and is never equal to a digest or a commit."""
    assert weights_identity("s3://bucket/x", weights_version="7") == "version:7"
    folder = make_folder(tmp_path / "a")
    assert weights_identity(str(folder), weights_version="7") == "version:7"


@pytest.mark.parametrize("model", ["s3://bucket/llama", "org/never-downloaded", "/no/such/folder"])
def test_weights_out_of_reach_name_the_remedy(tmp_path: Path, model: str) -> None:
    """What cannot be read is refused, with the option that helps."""
    with pytest.raises(ConfigError, match="weights_version"):
        weights_identity(model, hub_cache=tmp_path)


def test_a_folder_without_weights_names_the_remedy(tmp_path: Path) -> None:
    """A folder with only a configuration is refused: the weights come from elsewhere."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no weights in .*weights_version"):
        weights_identity(str(tmp_path))


def test_the_hub_cache_is_found_as_the_hubs_client_finds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The usual environment variables count, the most specific first."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert default_hub_cache() == Path("~/.cache/huggingface/hub").expanduser()
    monkeypatch.setenv("HF_HOME", "/h")
    assert default_hub_cache() == Path("/h/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/c")
    assert default_hub_cache() == Path("/c")
