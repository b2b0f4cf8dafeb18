r"""Sizes of decoder-only models, computed from their architecture, dense or mixture of experts.

With L layers, width w, H query and H_kv KV heads of size D, an MLP of m matrices of w times f (m = 3: gated), a
vocabulary of n tokens, E routed experts of width f_e of which a token uses k, and a shared expert of width f_s:

- attention: w D (2 H + 2 H_kv), plus biases and per-head norms where the family has them;
- MLP of a dense layer: m w f; of an expert layer: a router w E, E experts of m w f_e, a shared one of m w f_s + w;
- norms: 2 w per layer and one of w; embedding and output matrix: n w each, one matrix if tied.

When each of t tokens picks k of E experts uniformly and independently, a layer's tokens touch E (1 - (1 - k / E)^t) of
them (:meth:`ModelShape.touched`). Real routing is uneven, which touches fewer: the traffic is an upper estimate.

The counts equal those of the published models (tests compare with transformers' own modules). Not modelled: sliding
windows (refused: charging the full context would overstate), multi-head latent attention, recurrent and linear
layers, scales and zero points of quantised weights (about 0.1 to 0.5 bits each), tensor parallelism (one device).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropic_ctl.errors import BadInputError

__all__ = ["BITS", "MODELS", "ModelShape", "model_shape"]

BITS = (4, 8, 16, 32)
"""Widths of a stored number: int4, fp8 or int8, bf16 or fp16, fp32."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model on one device.

    Parameters
    ----------
    name : str
    layers, q_heads, kv_heads, head_dim : int
    layer_params : float
        All layers and norms, without embedding, output matrix and routed experts: what every token uses.
    head_params : float
        Output matrix (vocabulary times width).
    vocab_size : int
    embedding_params : float
        Input matrix where it is not the output matrix; 0 if tied.
    expert_params : float
        All routed experts of all layers; 0 for a dense model.
    experts, experts_per_token : int
        E and k of an expert layer; 0, 0 for a dense model.
    weight_bits, kv_bits : int
        Width of a stored weight, and of an element of K or V.

    Raises
    ------
    BadInputError
        If a width is not one of ``BITS``.
    """

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    layer_params: float
    head_params: float
    vocab_size: int
    embedding_params: float = 0.0
    expert_params: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    weight_bits: int = 16
    kv_bits: int = 16

    def __post_init__(self) -> None:
        for name in ("weight_bits", "kv_bits"):
            if getattr(self, name) not in BITS:
                raise BadInputError("not a width", field=name, value=getattr(self, name), allowed=f"one of {BITS}")

    @property
    def params(self) -> float:
        """All parameters, a tied matrix once."""
        return self.layer_params + self.expert_params + self.head_params + self.embedding_params

    @property
    def active_expert_params(self) -> float:
        """Parameters of the k routed experts per layer that a token uses."""
        return self.expert_params * self.experts_per_token / self.experts if self.experts else 0.0

    @property
    def active_params(self) -> float:
        """Parameters a token uses, embeddings included (how "8x7B" models state theirs)."""
        return self.params - self.expert_params + self.active_expert_params

    @property
    def weight_bytes(self) -> float:
        """Memory of all parameters."""
        return self.params * self.weight_bits / 8

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers, bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bits // 8

    def touched(self, tokens: float) -> float:
        """Return the expected share of an expert layer's experts that ``tokens`` tokens touch, in [0, 1]."""
        return 1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens if self.experts else 0.0

    def stored_as(self, weight_bits: int = 0, kv_bits: int = 0) -> ModelShape:
        """Return the same model with other widths; 0 keeps a width."""
        return dataclasses.replace(self, weight_bits=weight_bits or self.weight_bits, kv_bits=kv_bits or self.kv_bits)

    @classmethod
    def from_hf_config(cls, source: Mapping[str, Any] | str | Path, name: str = "") -> ModelShape:
        """Return the shape of any supported Hugging Face decoder.

        Parameters
        ----------
        source : mapping or path
            The contents of ``config.json``, that file, or the folder that holds it.
        name : str
            Default: the file's folder, or the model type.

        Raises
        ------
        BadInputError
            Naming file and key, if the file cannot be read, the model type is not supported, a key is missing or is
            no positive integer, or the model has a sliding window or pre-quantised weights.
        """
        if isinstance(source, Mapping):
            where, values = name or "model config", source
        else:
            path = Path(source)
            path = path / "config.json" if path.is_dir() else path
            where, values = str(path), _read(path)
            name = name or (path.parent.name if path.name == "config.json" else path.stem)
        return _shape(_Keys(values, where), name or str(values.get("model_type", "model")))


@dataclass(frozen=True)
class _Family:
    """What a model type adds to the common decoder: biases by (attention q/k/v, output), norms of q and k, tying."""

    qkv_bias: str = ""  # key of the config that switches it; "always"; "" for never
    output_bias: str = ""
    mlp_bias: str = ""
    qk_norm: bool = False
    moe: bool = False
    tied: bool = False
    window: str = ""  # "" none; "set" if sliding_window is set; "flag" if use_sliding_window is also true


_FAMILIES = {
    "gemma": _Family("attention_bias", "attention_bias", tied=True),
    "granite": _Family("attention_bias", "attention_bias", "mlp_bias"),
    "llama": _Family("attention_bias", "attention_bias", "mlp_bias"),
    "mistral": _Family(window="set"),
    "mixtral": _Family(moe=True, window="set"),
    "phi3": _Family(window="set"),
    "qwen2": _Family("always", window="flag"),
    "qwen2_moe": _Family("qkv_bias", moe=True, window="flag"),
    "qwen3": _Family("attention_bias", "attention_bias", qk_norm=True, window="flag"),
    "qwen3_moe": _Family("attention_bias", "attention_bias", qk_norm=True, moe=True, window="flag"),
    "smollm3": _Family("attention_bias", "attention_bias", "mlp_bias", tied=True, window="flag"),
}
_MOST_LAYERS = 10**5
_DTYPES = {"bfloat16": 16, "float16": 16, "float32": 32, "float8_e4m3fn": 8}


def _read(path: Path) -> Mapping[str, Any]:
    where, remedy = str(path), "pass a model folder or its config.json"
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise BadInputError(f"cannot read model config: {error.strerror}", where=where, remedy=remedy) from None
    except (ValueError, RecursionError):
        raise BadInputError("not JSON", where=where, remedy=remedy) from None
    if not isinstance(values, Mapping):
        raise BadInputError("not a JSON object", where=where, remedy=remedy)
    return values


class _Keys:
    """Typed access to a model config."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = 10**9) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            allowed = f"integers in [{least}, {most}]"
            raise BadInputError("not a size", where=self.where, field=key, value=value, allowed=allowed)
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise BadInputError("not a boolean", where=self.where, field=key, value=value, allowed="true or false")
        return value

    def refuse(self, problem: str, key: str, remedy: str) -> BadInputError:
        return BadInputError(problem, where=self.where, field=key, value=self.values.get(key), remedy=remedy)


def _family(keys: _Keys) -> _Family:
    kind = keys.values.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        allowed = ", ".join(_FAMILIES)
        raise BadInputError(
            "no shape for this model type", where=keys.where, field="model_type", value=kind, allowed=allowed
        )
    family = _FAMILIES[kind]
    if family.window and keys.values.get("sliding_window") is not None:
        window = keys.count("sliding_window")
        active = family.window == "set" or keys.flag("use_sliding_window")
        if active and window < keys.count("max_position_embeddings", window + 1, least=0):
            raise keys.refuse(
                "a sliding window is not modelled",
                "sliding_window",
                "set it to null in a copy of the config to charge for the full context",
            )
    if keys.values.get("quantization_config") is not None:
        raise keys.refuse(
            "pre-quantised weights are not read", "quantization_config", "remove it and set cost.weight_bits"
        )
    return family


def _shape(keys: _Keys, name: str) -> ModelShape:
    family = _family(keys)
    layers, width, heads = (
        keys.count("num_hidden_layers", most=_MOST_LAYERS),
        keys.count("hidden_size"),
        keys.count("num_attention_heads"),
    )
    kv_heads = keys.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise keys.refuse(
            "the query heads cannot share the KV heads equally", "num_key_value_heads", f"allowed: a divisor of {heads}"
        )
    head_dim = keys.count("head_dim", width // heads)
    vocabulary = keys.count("vocab_size")

    def switched(key: str) -> bool:
        return key == "always" or (bool(key) and keys.flag(key, key == "qkv_bias"))

    attention = 2 * width * head_dim * (heads + kv_heads)
    attention += head_dim * (heads + 2 * kv_heads) * switched(family.qkv_bias) + width * switched(family.output_bias)
    attention += 2 * head_dim * family.qk_norm

    def mlp(inner: int) -> int:
        return 3 * width * inner + (2 * inner + width) * switched(family.mlp_bias)

    sparse, experts, used, expert, shared = _experts(keys, family, layers)
    every = layers * (attention + 2 * width) + width
    if sparse < layers:
        every += (layers - sparse) * mlp(keys.count("intermediate_size"))
    every += sparse * (width * experts + (mlp(shared) + width if shared else 0))
    key = "torch_dtype" if keys.values.get("dtype") is None else "dtype"
    dtype = "bfloat16" if keys.values.get(key) is None else keys.values[key]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise keys.refuse("unknown dtype", key, f"one of {', '.join(_DTYPES)}")
    bits = _DTYPES[dtype]
    return ModelShape(
        name,
        layers,
        heads,
        kv_heads,
        head_dim,
        float(every),
        float(vocabulary * width),
        vocabulary,
        0.0 if keys.flag("tie_word_embeddings", family.tied) else float(vocabulary * width),
        float(sparse * experts * mlp(expert)),
        experts,
        used,
        bits,
        max(bits, 16),
    )


def _experts(keys: _Keys, family: _Family, layers: int) -> tuple[int, int, int, int, int]:
    """Return (expert layers, experts, experts per token, width of one, width of the shared one); zeros if dense."""
    if not family.moe:
        return 0, 0, 0, 0, 0
    mixtral = keys.values.get("model_type") == "mixtral"
    names = ("num_local_experts", "num_experts")  # transformers 5 writes the first for all
    experts = keys.count(next((key for key in names if keys.values.get(key) is not None), names[not mixtral]))
    used = keys.count("num_experts_per_tok")
    if used > experts:
        raise keys.refuse("more experts per token than there are", "num_experts_per_tok", f"at most {experts}")
    inner = keys.count("intermediate_size" if mixtral else "moe_intermediate_size")
    shared = keys.count("shared_expert_intermediate_size", 0, least=0)
    listed = keys.values.get("mlp_only_layers")
    listed = [] if listed is None else listed
    if not isinstance(listed, list | tuple) or any(type(i) is not int or i < 0 for i in listed):
        raise keys.refuse("not a list of layers", "mlp_only_layers", "give a list of integers >= 0")
    dense = set(listed)
    every = max(1, keys.count("decoder_sparse_step", 1, least=0))
    sparse = sum(i not in dense and (i + 1) % every == 0 for i in range(layers))
    return sparse, experts, used, inner, shared


def _published(sizes: tuple[int, int, int, int, int, int], **more: Any) -> dict[str, Any]:
    """Return the keys of a published config that matter here."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return {"model_type": "llama", **dict(zip((*names, "vocab_size"), sizes, strict=True)), **more}


_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
_PUBLISHED = {
    "llama-3-8b": _published((32, 4096, 14336, 32, 8, 128_256)),
    "llama-3-70b": _published((80, 8192, 28672, 64, 8, 128_256)),
    "mixtral-8x7b": _published((32, 4096, 14336, 32, 8, 32_000), **_MIXTRAL),
    "qwen3-30b-a3b": _published((48, 2048, 6144, 32, 4, 151_936), **_QWEN3_MOE),
    "smollm2-135m": _published((30, 576, 1536, 9, 3, 49_152), tie_word_embeddings=True),
}

MODELS = {name: ModelShape.from_hf_config(values, name) for name, values in _PUBLISHED.items()}
"""Model shapes by name, from the architecture in each model's published ``config.json`` (16-bit weights and cache)."""


def model_shape(name: str) -> ModelShape:
    """Return the model called ``name``, or that of a Hugging Face folder or ``config.json``.

    Raises
    ------
    BadInputError
        If it is neither; the message lists the names there are.
    """
    if name in MODELS:
        return MODELS[name]
    if not Path(name).exists():
        raise BadInputError(
            "no such model",
            where="cost",
            field="cost.model",
            value=name,
            allowed=f"{', '.join(MODELS)}, or the path of a model folder or config.json",
        )
    return ModelShape.from_hf_config(name)
