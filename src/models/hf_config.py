"""Hugging Face configs: made from fields, from a `config.json`, from a checkpoint's JSON.

Nothing here runs code that a folder brings along: the config class comes, by `model_type` alone, from the table of the
families we implement below, or else from the causal language models of the installed transformers.
"""

import copy
import difflib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config, SmolLM3Config

from models.errors import ArchError

CONFIG_CLASSES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "smollm3": SmolLM3Config,
}

# Accepted by every config class besides its own fields: transformers folds the first two into rope_parameters, and
# its models read head_dim from every config, whether or not the class declares it.
_COMMON_FIELDS = {"rope_theta", "rope_scaling", "head_dim"}
# What `to_dict` writes besides fields, and what is about one call of transformers' model.
_NOT_FIELDS = {"model_type", "dtype", "transformers_version", "_name_or_path", "output_attentions"}
# Code of other repositories that the config came with, and what is about weights on disk.
_CODE = {"auto_map", "quantization_config", "_attn_implementation", "attn_implementation", "_commit_hash"}
_LAYERS = "num_hidden_layers"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What configs call the ids of control tokens."""
_DTYPES = ("float16", "bfloat16", "float32", "float64")
_ROPE_DICTS = ("rope_parameters", "rope_scaling")
_ROPE_NUMBERS = (
    *("rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
)
_PER_LAYER_LISTS = ("layer_types", "no_rope_layers")
_MAX_SIZE = 2**31 - 1
_MAX_LAYERS = 4096

# Keys of other architectures (and of other families here) that would change the computation. In a class that has no
# such field transformers passes over them; here they must be off.
_FOREIGN_SWITCHES = (
    *("attention_bias", "qkv_bias", "mlp_bias", "use_bias", "lm_head_bias"),
    *(
        "alibi",
        "use_mrope",
        "rope_interleaved",
        "no_rope_layers",
        "use_qk_norm",
        "qk_layernorm",
        "parallel_attn",
        "clip_qkv",
    ),
    *("attn_logit_softcapping", "final_logit_softcapping", "attention_sinks", "attention_chunk_size"),
    *("hidden_dropout", "resid_pdrop", "embd_pdrop", "attention_dropout", "per_layer_config"),
    *("num_experts", "num_local_experts", "n_routed_experts"),
)
_FOREIGN_SCALES = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale")


def config_class_of(model_type: object) -> type[PretrainedConfig]:
    """The config class of a model type.

    Raises:
        ArchError: neither we nor transformers have such a decoder; the message names the nearest one.
    """
    if isinstance(model_type, str) and model_type in CONFIG_CLASSES:
        return CONFIG_CLASSES[model_type]
    # Late: it imports the name of every model, which takes a while.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not isinstance(model_type, str) or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        close = difflib.get_close_matches(str(model_type), [*CONFIG_CLASSES, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES], n=1)
        others = f"it is one of {', '.join(CONFIG_CLASSES)}, or another decoder that transformers has"
        raise ArchError("model_type", f"{model_type!r} is unknown; {f'did you mean {close[0]}?' if close else others}")
    config_class = CONFIG_MAPPING[model_type]
    if config_class.model_type != model_type:
        raise ArchError("model_type", f"transformers reads {model_type} as {config_class.model_type}: say that instead")
    return config_class


def known_fields(config_class: type[PretrainedConfig]) -> set[str]:
    """Field names that a config of this class may be given, what every config carries (dtype, ...) included.

    Raises:
        ArchError: the class has no defaults.
    """
    try:
        defaults = config_class()
    except Exception as error:  # the config classes raise whatever their validators raise
        raise ArchError("model_type", f"{config_class.model_type} cannot be described by fields") from error
    return set(defaults.to_dict()) | set(config_class.attribute_map) | _COMMON_FIELDS


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean x?`, or `; it is one of ...` where nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; it is one of {', '.join(sorted(known))}"


def construct_config(config_class: type[PretrainedConfig], fields: dict[str, Any]) -> PretrainedConfig:
    """The config with these fields, whatever its class raises turned into an ArchError that names the field.

    Args:
        config_class: from `config_class_of`.
        fields: not changed; of `CONFIG_CLASSES` known ones only.

    Raises:
        ArchError: a value that the class refuses, or a size out of range.
    """
    if fields.get("is_encoder_decoder"):
        raise ArchError("is_encoder_decoder", "only decoders are implemented")
    is_own = config_class in CONFIG_CLASSES.values()
    least = 1 if is_own else 0  # other families have counts that may be 0
    for key, value in fields.items():
        is_size = key.startswith("num_") or key.endswith("_size") or key == "head_dim"
        limit = _MAX_LAYERS if key == config_class.attribute_map.get(_LAYERS, _LAYERS) else _MAX_SIZE
        if is_size and isinstance(value, int) and not least <= value <= limit:
            bound = f"must be at least {least}" if value < least else f"must be at most {limit}"
            raise ArchError(key, f"{bound}, not {value}")
    head_dim = fields.get("head_dim")
    if head_dim is not None and type(head_dim) is not int:
        raise ArchError("head_dim", f"must be a whole number, not {head_dim!r}")
    fields = copy.deepcopy(fields)  # the classes write into the dicts that they are given
    for key in _ROPE_DICTS if is_own else ():
        if fields.get(key) is not None:
            fields[key] = _rope_numbers(key, fields[key])
    try:
        return config_class(**fields)
    except Exception as error:  # the config classes raise whatever their validators raise
        message = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split())
        named = [key for key in fields if re.search(rf"\b{key}\b", message)]
        if not named and "rope_parameters" in message:
            named = [key for key in _ROPE_DICTS if fields.get(key) is not None]
        raise ArchError(named[0] if named else "", message) from error


def config_from_dict(values: dict[str, Any]) -> PretrainedConfig:
    """The config that a `config.json`, or `config_to_dict`, describes. No code of the file's making is run.

    Legacy spellings (`rope_theta`, `rope_scaling`, `torch_dtype`) are read. `auto_map` is left out. In the families
    that we implement, so are keys that neither the config class nor transformers' model knows, unless they ask for
    another computation; in others everything goes to the class, as transformers does it.

    Raises:
        ArchError: unknown model type, a value that its class refuses, quantised weights, or a key of another
            architecture that would change the computation.
    """
    config_class = config_class_of(values.get("model_type"))
    if values.get("quantization_config") is not None:
        raise ArchError("quantization_config", "quantised weights are not implemented: use the unquantised model")
    if config_class in CONFIG_CLASSES.values():
        if values.get("partial_rotary_factor") not in (None, 1):
            raise ArchError("partial_rotary_factor", f"only 1 is implemented, not {values['partial_rotary_factor']!r}")
        known = known_fields(config_class)
        _refuse_foreign(values, known)
    else:
        known = set(values) - _CODE
    fields = {key: value for key, value in values.items() if key in known - _NOT_FIELDS}
    fields.pop("torch_dtype", None)
    if fields.get("head_dim", 0) is None:
        del fields["head_dim"]  # where the class has no such field, transformers would take None as the width
    dtype = values.get("dtype") or values.get("torch_dtype")
    if dtype not in (None, "auto"):
        if dtype not in _DTYPES:
            raise ArchError("dtype", f"{dtype!r} is not one of {', '.join(_DTYPES)}")
        fields["dtype"] = dtype
    return construct_config(config_class, fields)


def config_to_dict(config: PretrainedConfig) -> dict[str, Any]:
    """Plain JSON values that `config_from_dict` restores to an equal config, on any machine."""
    values = json.loads(json.dumps(config.to_dict()))
    return {key: value for key, value in values.items() if key not in _NOT_FIELDS - {"model_type", "dtype"}}


def read_config(folder: Path) -> PretrainedConfig:
    """The config of a Hugging Face model folder.

    Args:
        folder: has a `config.json`.

    Raises:
        ArchError: no such file, no JSON object in it, or what `config_from_dict` refuses. The message names the file.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if (folder / "adapter_config.json").is_file():
            message = (
                f"{folder} holds adapters of peft and no model: merge them (export-hf --merge does that of a run's)"
            )
            raise ArchError("", message) from error
        raise ArchError("", f"{path} does not exist: a Hugging Face model folder has one") from error
    except OSError as error:
        raise ArchError("", f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested beyond measure
        raise ArchError("", f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ArchError("", f"{path} holds no JSON object")
    try:
        return config_from_dict(values)
    except ArchError as error:
        raise ArchError(error.key, f"{error.message} (in {path})") from error


def shorten(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """The same architecture with its first `num_layers` layers.

    Raises:
        ArchError: it has fewer layers, or none is left.
    """
    if not 1 <= num_layers <= config.num_hidden_layers:
        raise ArchError(_LAYERS, f"cannot keep {num_layers} of {config.num_hidden_layers} layers")
    values = config_to_dict(config)
    values[config.attribute_map.get(_LAYERS, _LAYERS)] = num_layers
    for key in _PER_LAYER_LISTS:
        if values.get(key) is not None:
            values[key] = values[key][:num_layers]
    return config_from_dict(values)


def with_vocab_size(config: PretrainedConfig, vocab_size: int) -> PretrainedConfig:
    """The same architecture with another number of tokens."""
    changed = copy.deepcopy(config)
    changed.vocab_size = vocab_size
    return changed


def _rope_numbers(key: str, parameters: Any) -> dict[str, Any]:
    """The RoPE parameters without numbers that are null, which is how files write "not given"; the classes trip over
    them, and over what is no number."""
    if not isinstance(parameters, dict):
        raise ArchError(key, f"must be a table of RoPE parameters, not {parameters!r}")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ArchError(key, "RoPE parameters of their own for each layer type are not implemented")
    for name in _ROPE_NUMBERS:
        value = parameters.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ArchError(key, f"{name} must be a number, not {value!r}")
    return {name: value for name, value in parameters.items() if value is not None or name not in _ROPE_NUMBERS}


def _refuse_foreign(values: dict[str, Any], known: set[str]) -> None:
    model_type = values["model_type"]
    for key in (*_FOREIGN_SWITCHES, *_FOREIGN_SCALES):
        if key in known or key not in values:
            continue
        value = values[key]
        off = not value or (key in _FOREIGN_SCALES and value == 1 and value is not True)
        if not off:
            raise ArchError(key, f"{model_type} has no such field, and {value!r} would change the computation")
    window = values.get("sliding_window")
    if "sliding_window" not in known and window is not None and values.get("use_sliding_window") is not False:
        raise ArchError("sliding_window", f"{model_type} has no such field, and {window!r} may change the computation")
    layer_types = values.get("layer_types")
    full_only = layer_types is None or (
        isinstance(layer_types, list) and set(map(str, layer_types)) <= {"full_attention"}
    )
    if "layer_types" not in known and not full_only:
        raise ArchError("layer_types", f"{model_type} has no such field, and not all of its layers are full_attention")
