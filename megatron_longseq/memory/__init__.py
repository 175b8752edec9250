"""What is kept for backward, and what is computed again: policies over Megatron's recompute."""
