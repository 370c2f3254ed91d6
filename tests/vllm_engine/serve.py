"""Starts a vLLM server whose engine has no packed weights. Its engine runs in a process that imports this file again."""

import runpy


def without_packed_weights() -> None:
    import vllm._custom_ops
    import vllm.model_executor.layers.utils

    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *arguments: False


if __name__ in ("__main__", "__mp_main__"):
    without_packed_weights()
if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
