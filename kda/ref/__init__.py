"""The specification and its chunked form in plain PyTorch, and the rounding error both are measured with."""
