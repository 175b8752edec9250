"""Training Transformers on very long sequences with Megatron-LM."""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # On first use: importing the package must not import torch.
    if name == "two_d_attention":
        from .attention_2d import two_d_attention

        return two_d_attention
    if name == "ring_matmul_chain":
        from .metp.matmul_chain import ring_matmul_chain

        return ring_matmul_chain
    if name == "linear_attention":
        from .lasp import linear_attention

        return linear_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
