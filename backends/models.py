"""Load a decoder: the embedded default, a Hugging Face folder, or a GGUF file.

Models are not ours: any decoder that transformers builds works. Every file is checked before any weight is set, and
a model with missing weights is an error, never half a model.
"""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from backends import fetch as fetching
from backends.fetch import DEFAULT, fetch
from backends.model_files import check_folder, check_gguf, read_json
from entropic_ctl.errors import BadInputError

__all__ = ["DEFAULT", "LoadedModel", "Shape", "fetch", "load", "quiet", "read_gguf", "wrap"]

_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Parameters
    ----------
    layers, heads, kv_heads, head_dim, hidden : int
    parameters : int
        All weights, tied ones counted once.
    body_parameters : int
        Weights of the layers: without the embedding tables (looked up, not multiplied) and without the output head.
    active_parameters : int
        Of ``parameters``, those one token uses: a mixture's k of E experts, its routers and shared experts, all else.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    parameters: int
    body_parameters: int
    active_parameters: int

    @property
    def active_body_parameters(self) -> int:
        """Weights of the layers that one token is multiplied with."""
        return self.body_parameters - (self.parameters - self.active_parameters)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with what an engine needs to know about it.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        In evaluation mode.
    tokenizer : object
        Anything with ``encode`` and ``decode``; None in tests that use token ids only.
    name : str
    eos_ids : frozenset of int
        Every token that ends a text: the union of generation config, model config and tokenizer.
    vocab_size : int
        Width of the logits.
    max_context : int
        Longest context the model accepts, tokens.
    shape : Shape
    """

    model: Any
    tokenizer: Any
    name: str
    eos_ids: frozenset[int]
    vocab_size: int
    max_context: int
    shape: Shape

    def prompt_ids(self, text: str, *, chat: bool = True) -> list[int]:
        """Return the token ids of a prompt, as a user turn of the chat template when the model has one and ``chat``."""
        if self.tokenizer is None:
            raise BadInputError("the model has no tokenizer", where=self.name, remedy="submit token ids")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # bytes of another encoding arrive as lone surrogates
            raise BadInputError("not Unicode text", field="prompt", value=text[error.start : error.end]) from None
        if chat and getattr(self.tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return [int(t) for t in self.tokenizer.encode(text, add_special_tokens=False)]
        return [int(t) for t in self.tokenizer.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated tokens, special tokens left out, spaces as the model wrote them."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def load(path: str | Path = DEFAULT, dtype: str = "bfloat16", device: str = "cpu") -> LoadedModel:
    """Load a decoder.

    Parameters
    ----------
    path : str or Path
        ``smollm2-135m`` (the fetched default), a Hugging Face folder, or a GGUF file.
    dtype : {'bfloat16', 'float16', 'float32'}
        Dtype of the weights.
    device : str
        A torch device.

    Raises
    ------
    BadInputError
        Before any weight is set: a path that does not exist, a missing or damaged file (named), no tokenizer, a model
        that is not a decoder, an unknown dtype or device.
    """
    import torch

    if dtype not in _DTYPES:
        raise BadInputError("unknown dtype", field="dtype", value=dtype, allowed=", ".join(_DTYPES))
    torch_dtype = getattr(torch, dtype)
    try:
        target = torch.device(device)
        torch.empty(0, device=target).cpu()  # the device "meta" holds no data
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadInputError(
            f"no such device here: {str(error).splitlines()[0]}", field="device", value=device, remedy="try 'cpu'"
        ) from None
    if str(path) == DEFAULT and not Path(path).exists():
        place = fetching.default_folder()
        if not place.is_dir():
            raise BadInputError("the default model is not fetched", where=str(place), remedy="run `entropic fetch`")
    else:
        place = Path(path)
    if place.is_dir():
        model, tokenizer = _read_folder(place, torch_dtype)
    elif place.is_file():
        model, tokenizer = read_gguf(place, torch_dtype)
    else:
        raise BadInputError(
            "no such model",
            where=str(place),
            allowed=f"{DEFAULT}, a Hugging Face folder, or a GGUF file",
            remedy="check the path",
        )
    return wrap(model.to(target), tokenizer, name=place.name if str(path) != DEFAULT else DEFAULT)


def wrap(model: Any, tokenizer: Any, *, name: str = "model") -> LoadedModel:
    """Describe a transformers decoder that is already in memory.

    Raises
    ------
    BadInputError
        If some layer of it cannot run on the paged cache (it would decode, and be wrong).
    """
    from torch import nn

    from backends.probe import active_parameters, attention_facts

    model = model.eval()
    facts, chosen = attention_facts(model, name)
    tables = {id(m.weight): int(m.weight.numel()) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = model.get_output_embeddings().weight
    parameters = sum(int(p.numel()) for p in model.parameters())  # a tied weight appears once
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        eos_ids=_eos_ids(model, tokenizer),
        vocab_size=int(head.shape[0]),
        max_context=_max_context(model.config),
        shape=Shape(
            layers=facts.layers,
            heads=facts.heads,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            hidden=int(head.shape[1]),
            parameters=parameters,
            body_parameters=parameters - sum((tables | {id(head): int(head.numel())}).values()),
            active_parameters=active_parameters(model, chosen),
        ),
    )


def stated_context(path: str) -> int:
    """Return the longest context by ``config.json`` of a folder, before anything is loaded; 0 if it says none."""
    folder = fetching.default_folder() if path == DEFAULT and not Path(path).exists() else Path(path)
    try:
        return _max_context(SimpleNamespace(**json.loads((folder / "config.json").read_text("utf-8"))))
    except (OSError, ValueError, TypeError, AttributeError):
        return 0


def _max_context(config: Any) -> int:
    """Return the longest context at which a token's rotary angles depend on nothing but its position.

    Past ``original_max_position_embeddings`` the ``longrope`` frequencies switch for the whole packed batch, whatever
    the lengths of its other rows.
    """
    limit = int(getattr(config, "max_position_embeddings", 0) or 2**31 - 1)
    rope = getattr(config, "rope_parameters", None) or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        limit = min(limit, int(original or limit))
    return limit


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the union of what generation config, model config and tokenizer call the end of text."""
    found: set[int] = set()
    sources = (getattr(model, "generation_config", None), model.config, tokenizer)
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update(int(v) for v in (value if isinstance(value, list | tuple) else [value]))
    return frozenset(found)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars, notices and warnings; errors still raise."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _read_folder(folder: Path, dtype: Any) -> tuple[Any, Any]:
    fetching.verify_folder(folder)
    weights = check_folder(folder)
    read_json(folder / "config.json")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with quiet():
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # noqa: BLE001 - configuration classes raise anything on a bad value
            raise _refusal("configuration", folder / "config.json", error) from None
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # noqa: BLE001 - tokenizer classes raise anything on a damaged file
            raise _refusal("tokenizer", folder, error) from None
        if len(tokenizer) < 2:
            raise BadInputError(
                "the tokenizer has no vocabulary", where=str(folder), field="tokenizer", value=len(tokenizer)
            )
        try:
            config.transformers_weights = weights  # the file that was checked, whatever else lies there
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # to name them: they are refused below
            )
        except Exception as error:  # noqa: BLE001 - as above
            raise _refusal("weights", folder, error) from None
    _refuse_partial(info, folder, int(getattr(model.config, "num_hidden_layers", 0) or 0))
    return model, tokenizer


def read_gguf(path: Path, dtype: Any) -> tuple[Any, Any]:
    """Return (model, tokenizer) of a GGUF file, de-quantised to ``dtype``.

    Raises
    ------
    BadInputError
        If the file is not GGUF, is cut short, or holds an architecture that transformers does not read.
    """
    check_gguf(path)
    import transformers

    extra: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # from 5.2x on; before, GGUF files were always de-quantised
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with quiet():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                **source, dtype=dtype, output_loading_info=True, **extra
            )
        except Exception as error:  # noqa: BLE001 - readers raise anything on a damaged file
            raise _refusal("GGUF", path, error) from None
    _refuse_partial(info, path, int(model.config.num_hidden_layers))
    for name in ("hf_quantizer",):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized = False
    return model, tokenizer


def _layer(tensor: str) -> int:
    """Return the layer a tensor's name puts it in, or -1."""
    numbers = [int(part) for part in tensor.split(".") if part.isdecimal()]
    return numbers[0] if numbers else -1


def _refusal(part: str, place: Path, error: Exception) -> BadInputError:
    said = " ".join(str(error).split())[:300] or type(error).__name__
    return BadInputError(f"cannot read the {part}: {said}", where=str(place), remedy="get the model's files again")


def _refuse_partial(info: dict[str, Any], place: Path, layers: int) -> None:
    """Refuse a checkpoint that fills the model only in part, or of which whole layers would be left out."""
    unused = sorted(str(key) for key in info.get("unexpected_keys") or () if _layer(str(key)) >= layers)
    if unused:
        raise BadInputError(
            f"the weights have layers the configuration does not name: {len(unused)} tensors",
            where=str(place),
            field=unused[0],
            allowed=f"layers 0 to {layers - 1}",
            remedy="correct num_hidden_layers in config.json, or get the model's files again",
        )
    missing = sorted(info.get("missing_keys") or ())
    mismatched = sorted(str(key) for key in info.get("mismatched_keys") or ())
    if missing or mismatched:
        raise BadInputError(
            f"weights {'missing' if missing else 'of the wrong shape'}: {len(missing or mismatched)} tensors",
            where=str(place),
            field=(missing or mismatched)[0],
            remedy="get the model's files again",
        )
