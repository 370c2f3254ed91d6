"""Starts a vLLM server on the CPU."""

import runpy


def without_packed_weights() -> None:
    """Keeps vLLM from copying weights to the format of the CPU's kernels. It does not update such copies."""
    import vllm._custom_ops
    import vllm.model_executor.layers.utils

    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *arguments: False


if __name__ in ("__main__", "__mp_main__"):  # the engine of a server has a process that imports this file again
    without_packed_weights()
if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
