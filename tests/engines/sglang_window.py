"""A tiny model whose layers attend to a window and to everything in turn, as a folder that SGLang loads."""

from __future__ import annotations

import json
from pathlib import Path

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 256, 256, 4, 2, 64, 512
#: Tokens that a layer with a window sees.
WINDOW = 48
PATTERN = [1, 0] * (LAYERS // 2)
DEVIATION = 0.2
#: Bytes of 16 tokens, K and V.
PAGE_BYTES_A_LAYER = 2 * KV_HEADS * HEAD_DIM * 16 * 4

CONFIG = {
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "logit_scale": 1.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in PATTERN],
    # So does SGLang know that it should keep two pools.
    "is_hybrid_swa": True,
    "hybrid_layer_pattern": PATTERN,
}


def make(folder: Path) -> Path:
    """Writes the model; needs torch and safetensors."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> "torch.Tensor":
        return torch.randn(*shape, generator=generator) * DEVIATION

    tensors = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN) * 4,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        attention, rest = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}."
        tensors |= {
            attention + "q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
            attention + "k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            attention + "v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            attention + "o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
            rest + "mlp.gate_proj.weight": random(INNER, HIDDEN),
            rest + "mlp.up_proj.weight": random(INNER, HIDDEN),
            rest + "mlp.down_proj.weight": random(HIDDEN, INNER),
            rest + "input_layernorm.weight": torch.ones(HIDDEN),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
