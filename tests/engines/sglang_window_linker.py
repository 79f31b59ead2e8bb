"""For tests only: the linker in an engine whose reads of windows have been put right.

The attention backend that SGLang 0.5.23 has for CPUs writes the keys and values of layers with a window at
their places in the pool of windows and reads them by their places in the other pool. The two agree in a
fresh engine only: without this, its own prefix cache gives other tokens than a computation."""

from __future__ import annotations

from typing import Any, Callable

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang_tampering import TamperingLinker


class WindowLinker(TamperingLinker):
    """Puts it right in the process that runs the model, which is the linker's."""

    def __init__(self, server_args: Any, params: Any, **options: Any):
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        pool = kvcache.swa_kv_pool
        windows = {buffer.data_ptr() for buffer in (*pool.k_buffer, *pool.v_buffer)}

        def read_right(run: Callable) -> Callable:
            def right(self: Any, query: Any, output: Any, keys: Any, values: Any, places: Any, *more: Any, **named: Any) -> Any:
                if keys.data_ptr() in windows:
                    places = kvcache.full_to_swa_index_mapping[places]
                return run(self, query, output, keys, values, places, *more, **named)

            return right

        for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
            setattr(TorchNativeAttnBackend, name, read_right(getattr(TorchNativeAttnBackend, name)))
        super().__init__(server_args, params, **options)
