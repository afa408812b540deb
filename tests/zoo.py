"""Tiny random models of every class that `AutoModelForCausalLM` knows: `names()` lists them, `build()` makes one.

A config's size-like attributes are shrunk by name (`SMALL`), its per-layer lists to one layer of each kind, and what
is left of the odd ones out stands in `SPECIAL`. Weights are random enough that greedy continuations vary.
"""

import warnings
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 250
GAIN = 2.0
"""How far the weights' scale is above one that keeps activations as they are: layers must outweigh the embedding."""


class CannotBuild(Exception):
    """This class cannot be built here; the message says why."""


_BY_SIZE: dict[Any, str] = {
    0: "pad_token_id",
    1: "bos_token_id decoder_start_token_id first_k_dense_replace n_shared_experts num_shared_experts "
    "moe_num_shared_experts num_dense_layers n_group topk_group num_expert_group",
    2: "eos_token_id num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
    "swa_num_key_value_heads num_query_groups n_layer n_layers num_layers num_hidden_layers decoder_layers "
    "encoder_layers num_decoder_layers num_encoder_layers linear_num_key_heads num_blocks index_n_heads",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads attention_heads swa_num_attention_heads num_experts "
    "n_routed_experts num_local_experts moe_num_experts linear_num_value_heads linear_num_heads index_topk",
    8: "sliding_window sliding_window_size attention_window_size window_size local_attention attention_chunk_size "
    "chunk_size qk_rope_head_dim rotary_dim mamba_d_state state_size ssm_state_size time_step_rank mamba_dt_rank "
    "mamba_chunk_size d_rel",
    12: "v_head_dim",
    16: "head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim swa_head_dim d_head "
    "mamba_d_head mamba_head_dim index_head_dim kv_channels dim_head attention_head_size query_pre_attn_scalar",
    32: "kv_lora_rank q_lora_rank moe_intermediate_size shared_expert_intermediate_size mm_tokens_per_image "
    "shared_intermediate_size shared_experts_intermediate_size moe_shared_expert_intermediate_size rel_extent "
    "expert_ffn_hidden_size lru_width_ hidden_size_per_layer_input",
    64: "hidden_size d_model n_embd emb_dim embedding_size word_embed_proj_dim embedding_dim input_embedding_size "
    "output_embedding_size lru_width pronunciation_embed_dim shape_embed_dim",
    96: "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim ffn_hidden_size dff dim_ff d_inner "
    "feed_forward_size intermediate_size_mlp dense_intermediate_size",
    512: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length model_max_length",
    VOCAB: "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size shape_vocab_size",
}
SMALL = {name: size for size, names_ in _BY_SIZE.items() for name in names_.split()}

_MIXED = {"layer_types": ["full_attention", "sliding_attention"]}
_WINDOWED = _MIXED | {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
_SHARED_KV = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 1},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 500,
        "local_attention_window_len": 8,
        "encoder_config": {"hidden_size_global": 64, "intermediate_size": 96},
        "decoder_config": {"hidden_size_global": 64},
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v4": {"head_dim": 64},
    "dory": {
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "dots1": _WINDOWED | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128},
    "gemma3n_text": _SHARED_KV | {"activation_sparsity_pattern": [0.5, 0.0] * 2},
    "gemma4_text": _SHARED_KV,
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _MAMBA | {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": _MIXED | {"num_attention_heads_per_layer": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mellum": _MIXED,
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "qwen2": _WINDOWED,
    "qwen2_moe": _WINDOWED,
    "qwen3": _WINDOWED,
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [16, 48],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "smollm3": _WINDOWED | {"no_rope_layers": [1, 0]},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "chunk_size": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 5, "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"]},
    "zamba2": {"n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 8},
}


def names() -> list[tuple[str, str]]:
    """(model type, class name) of every class once, under the model type that is most its own."""
    by_class: dict[str, str] = {}
    for model_type, cls in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        own = getattr(transformers, cls).config_class.model_type == model_type
        if own or cls not in by_class:
            by_class[cls] = model_type
    return [(model_type, cls) for cls, model_type in by_class.items()]


def build(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model in eval mode, the same for the same seed. Raises `CannotBuild`."""
    cls = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    own = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
    config_class = own if issubclass(own, cls.config_class) else cls.config_class
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        try:
            model: PreTrainedModel = cls(config_class(**_small(config_class(), SPECIAL.get(model_type, {}))))
        except ImportError as error:
            raise CannotBuild(f"needs a package: {_one_line(error)}") from error
        except Exception as error:
            raise CannotBuild(f"no small model of it: {_one_line(error)}") from error
        _randomize(model)
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id, generation.bos_token_id = None, 0, 1
    generation.decoder_start_token_id, generation.use_cache = 1, True
    model.float().eval()
    return model


def _small(config: PreTrainedConfig, special: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make a config of this class small."""
    values = vars(config)
    small = {name: size for name, size in SMALL.items() if values.get(name) is not None}
    if "head_dim" in values:
        small["head_dim"] = small.get("qk_rope_head_dim", 16)
    # Sizes that a config derives, or leaves out, where it is given none.
    small |= {name: SMALL[name] for name in ("num_key_value_heads", "sliding_window") if name in values}
    if "kv_lora_rank" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    switches = {"is_decoder": True, "use_cache": True, "tie_word_embeddings": False}
    small |= {name: value for name, value in switches.items() if name in values}
    small |= _layers(values)
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            small[name] = _small(value, special.get(name, {}))
    small |= {name: value for name, value in special.items() if not isinstance(values.get(name), PreTrainedConfig)}
    return small


def _layers(values: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind (two at least) where a config has lists with an entry for each layer."""
    count = values.get("num_hidden_layers") or 0
    lists = {k: v for k, v in values.items() if isinstance(v, list) and count == len(v) and v[:2] != [0, 1]}
    if not lists:
        return {}
    kinds = [tuple(map(str, kind)) for kind in zip(*lists.values(), strict=True)]
    keep = sorted({kinds.index(kind) for kind in kinds})
    keep = keep if len(keep) > 1 else [0, count - 1]
    return {"num_hidden_layers": len(keep)} | {k: [v[i] for i in keep] for k, v in lists.items()}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


def _randomize(model: PreTrainedModel) -> None:
    """Matrices are drawn anew; vectors (norms, biases, decays) keep their own start, with noise."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            fan_in = parameter[0].numel()
            torch.nn.init.normal_(parameter, std=GAIN * fan_in**-0.5)
        elif parameter.is_floating_point():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
