"""OrbitKV in SGLang: `linker` for 0.5.23 and later, `hicache` for 0.5.20 and later.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "OrbitKVLinker", "linker_module_path": "orbitkv.sglang.linker"}'

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "orbitkv", "module_path": "orbitkv.sglang.hicache", "class_name": "OrbitKVStorage",
      "interface_v1": 1, "allocator": "shm"}'

Only these two modules import SGLang; the rest needs neither SGLang nor torch.
"""
