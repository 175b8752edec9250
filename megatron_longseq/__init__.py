"""Training Transformers on very long sequences with Megatron-LM."""

__version__ = "0.1.0"
