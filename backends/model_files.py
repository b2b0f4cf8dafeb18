"""Check, before any weight is set, that a model's files are there, whole, and of a decoder.

A checkpoint is read from ``model.safetensors.index.json`` if present (then every shard it names must be there, and
other files are ignored), else from ``model.safetensors``. A file is whole if its header parses and the tensors it
declares end exactly where the file does.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entropic_ctl.errors import BadInputError

__all__ = ["check_folder", "check_gguf", "check_safetensors", "read_json"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_MAX_HEADER = 100_000_000


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, with errors that name the file."""
    try:
        values = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise BadInputError(f"cannot read: {error.strerror}", where=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"not JSON: {error}", where=str(path), remedy="get the model's files again") from None
    if not isinstance(values, dict):
        raise BadInputError("not a JSON object", where=str(path), value=values)
    return values


def check_folder(folder: Path) -> str:
    """Check a Hugging Face folder and return the name of its weights file (the index, or the single file).

    Raises
    ------
    BadInputError
        Naming the file or shard that is missing, cut short or of the wrong kind.
    """
    where = str(folder)
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise BadInputError(
            "no config.json in the model folder",
            where=where,
            allowed="a Hugging Face folder of a decoder, or a GGUF file",
            remedy="check the path",
        )
    _check_decoder(read_json(config_path), str(config_path))
    if not any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS):
        raise BadInputError(
            "no tokenizer in the model folder",
            where=where,
            allowed="tokenizer.json, tokenizer.model, or vocab.json with merges.txt",
            remedy="copy the tokenizer files of the model there",
        )
    index = folder / INDEX
    if index.is_file():
        _check_shards(folder, index)
        return INDEX
    if (folder / SINGLE).is_file():
        check_safetensors(folder / SINGLE)
        return SINGLE
    directory = next((item.name for item in sorted(folder.glob("*.safetensors")) if item.is_dir()), None)
    raise BadInputError(
        f"{directory} is a directory, not weights" if directory else "no weights in the model folder",
        where=where,
        field=directory or SINGLE,
        allowed=f"{SINGLE}, or {INDEX} with its shards (pickled .bin weights are not read)",
        remedy="get the model's files again",
    )


def _check_decoder(config: Mapping[str, Any], where: str) -> None:
    architectures = config.get("architectures") or []
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    decoder = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    if config.get("is_encoder_decoder") or not decoder:
        raise BadInputError(
            "not a decoder",
            where=where,
            field="architectures",
            value=architectures,
            allowed="an architecture ending in ForCausalLM",
            remedy="choose a text-generation model",
        )


def _check_shards(folder: Path, index: Path) -> None:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInputError("no weight_map", where=str(index), field="weight_map", value=weight_map)
    for shard in sorted({str(name) for name in weight_map.values()}):
        path = folder / shard
        if Path(shard).name != shard:
            raise BadInputError("shard outside the folder", where=str(index), field="weight_map", value=shard)
        if not path.is_file():
            problem = "shard is a directory" if path.is_dir() else "shard missing"
            raise BadInputError(problem, where=str(folder), field=shard, remedy=f"{INDEX} names it: get it again")
        held = check_safetensors(path)
        for tensor, name in weight_map.items():
            if name == shard and tensor not in held:
                raise BadInputError("shard lacks a tensor the index promises", where=str(path), field=tensor)


def check_safetensors(path: Path) -> frozenset[str]:
    """Return the tensor names of a safetensors file whose header parses and whose data are complete."""
    where, remedy = str(path), "the file is cut short or damaged: get it again"
    size = path.stat().st_size
    with path.open("rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise BadInputError("not a complete safetensors file", where=where, remedy=remedy)
        try:
            header = json.loads(handle.read(length))
            end = max((int(t["data_offsets"][1]) for n, t in header.items() if n != "__metadata__"), default=0)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
            raise BadInputError("damaged safetensors header", where=where, remedy=remedy) from None
    if size != 8 + length + end:
        raise BadInputError(
            "wrong size for its header", where=where, value=size, allowed=f"{8 + length + end} bytes", remedy=remedy
        )
    return frozenset(name for name in header if name != "__metadata__")


def check_gguf(path: Path) -> None:
    """Check that a GGUF file's header parses and that its last tensor lies inside the file."""
    where, remedy = str(path), "the file is cut short or damaged: get it again"
    with path.open("rb") as handle:
        if handle.read(4) != b"GGUF":
            raise BadInputError("not a GGUF file", where=where, allowed="a Hugging Face folder, or a GGUF file")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
    except (ValueError, KeyError, IndexError, OSError, OverflowError, MemoryError) as error:
        raise BadInputError(f"damaged GGUF file: {error}", where=where, remedy=remedy) from None
    if end == 0 or end > path.stat().st_size:
        raise BadInputError("GGUF file without all its tensors", where=where, remedy=remedy)
