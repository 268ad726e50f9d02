"""The engine `vllm`, in a process of its own."""
