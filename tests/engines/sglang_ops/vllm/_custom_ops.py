"""For tests only: the operations that SGLang takes from vLLM on a device that it has none for, in plain
torch. Both runs of every comparison use them."""

import torch


def rms_norm(out, x, weight, epsilon):
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    out.copy_((wide * scale).to(x.dtype) * weight)


def fused_add_rms_norm(x, residual, weight, epsilon):
    residual.add_(x)
    rms_norm(x, residual, weight, epsilon)


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox, *_, **__):
    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).chunk(2, -1)
    rotated = 2 * cos.shape[-1]
    for heads in (query, key):
        if heads is None:
            continue
        view = heads.view(positions.numel(), -1, head_size)
        part = view[..., :rotated]
        c, s = (table.unsqueeze(1).to(heads.dtype) for table in (cos, sin))
        if is_neox:
            x, y = part.chunk(2, -1)
            turned = torch.cat((x * c - y * s, y * c + x * s), -1)
        else:
            x, y = part[..., ::2], part[..., 1::2]
            turned = torch.stack((x * c - y * s, y * c + x * s), -1).flatten(-2)
        view[..., :rotated] = turned
