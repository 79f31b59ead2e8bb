"""A tiny Qwen3 with random weights, as a folder that engines load.

Weights are large enough that greedy tokens depend on every restored byte: the corrupted control of each
engine shows it. The same folder serves every engine."""

from __future__ import annotations

import json
from pathlib import Path

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 3, 128, 256, 4, 2, 64, 512
DEVIATION = 0.25

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": LAYERS,
    "initializer_range": 0.02,
    "use_cache": True,
    "attention_dropout": 0.0,
}


def make(folder: Path, seed: int = 7) -> Path:
    """Writes the model; needs torch and safetensors."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> "torch.Tensor":
        return torch.randn(*shape, generator=generator) * DEVIATION

    tensors = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN) * 4,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": random(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        attention, rest = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}."
        tensors |= {
            attention + "q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
            attention + "k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            attention + "v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            attention + "o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
            attention + "q_norm.weight": torch.ones(HEAD_DIM) * 2,
            attention + "k_norm.weight": torch.ones(HEAD_DIM),
            rest + "mlp.gate_proj.weight": random(INNER, HIDDEN),
            rest + "mlp.up_proj.weight": random(INNER, HIDDEN),
            rest + "mlp.down_proj.weight": random(HIDDEN, INNER),
            rest + "input_layernorm.weight": torch.ones(HIDDEN),
            rest + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
