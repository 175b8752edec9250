"""METP, memory-efficient tensor parallelism: weights and K/V circulate, activations stay."""
