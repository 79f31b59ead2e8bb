"""OrbitKV as a KV connector of vLLM 0.26 and later.

    --kv-transfer-config '{"kv_connector": "OrbitKVConnector", "kv_connector_module_path": "orbitkv.vllm",
                           "kv_role": "kv_both"}'

What `kv_connector_extra_config` may say is in `options`.
"""

from orbitkv.vllm.connector import OrbitKVConnector

__all__ = ["OrbitKVConnector"]
