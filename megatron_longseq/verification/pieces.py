"""Tensors in global coordinates: what each rank holds of what.

Megatron describes every parameter, in every layout, by a key, a global shape and the offset of the
local shard (``sharded_state_dict``, made for checkpoints). The same description serves to fill
equal weights into any layout and to compare gradients and parameters between layouts.
"""

import dataclasses
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A local shard of a global tensor.

    ``data`` has as many dimensions as ``global_shape``; it stands at ``offset`` in it.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor

    def slice_of(self, whole: Tensor) -> Tensor:
        """This piece's part of a global tensor, as a view."""
        ends = [o + n for o, n in zip(self.offset, self.data.shape, strict=True)]
        return whole[tuple(slice(o, e) for o, e in zip(self.offset, ends, strict=True))]


def parameter_pieces(
    models: list[torch.nn.Module], value_of: Callable[[torch.nn.Parameter], Tensor]
) -> Iterator[Piece]:
    """Yields the pieces of every parameter of the model chunks on this rank.

    Args:
        models: the chunks, wrapped or not.
        value_of: what to describe for a parameter: its data, its gradient, ..; of its shape.
    """
    for model in unwrap_model(models):
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, entry in _leaves(model.sharded_state_dict()):
            parameter = parameters.get(name)
            if parameter is None or not isinstance(entry, ShardedTensor | ShardedTensorFactory):
                continue
            yield from _pieces_of(entry, value_of(parameter))


def _pieces_of(entry: ShardedTensor | ShardedTensorFactory, value: Tensor) -> Iterator[Piece]:
    if isinstance(entry, ShardedTensorFactory):
        # A parameter that a checkpoint holds in several parts, such as the two halves of SwiGLU.
        for _, part in _leaves({"": dataclasses.replace(entry, data=value).build()}):
            yield _piece(part, part.data)
    else:
        yield _piece(entry, value)


def _piece(entry: ShardedTensor, value: Tensor) -> Piece:
    data = value.reshape((1,) * entry.prepend_axis_num + tuple(entry.local_shape))
    return Piece(entry.key, tuple(entry.global_shape), tuple(entry.global_offset), data)


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, str(key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value, name)
    else:
        yield name, tree


def fill_parameters(models: list[torch.nn.Module], *, std: float, norm_weight: float) -> None:
    """Gives every parameter values that depend on its key and global position alone.

    Matrices get N(0, std^2); weights of norms N(norm_weight, 0.1^2) and all other vectors
    N(0, 0.1^2), so that norms and biases take part in the comparison too.
    """
    with torch.no_grad():
        for piece in parameter_pieces(models, lambda parameter: parameter.data):
            generator = torch.Generator().manual_seed(zlib.crc32(piece.key.encode()))
            # float64 whatever the run computes in: each precision rounds the same numbers.
            shape = piece.global_shape
            whole = torch.randn(shape, generator=generator, dtype=torch.float64)
            is_weight, is_norm = piece.key.endswith("weight"), "norm" in piece.key
            spread = std if is_weight and not is_norm else 0.1
            center = norm_weight if is_weight and is_norm else 0.0
            piece.data.copy_(piece.slice_of(whole) * spread + center)


def assemble(pieces: list[Piece]) -> dict[str, Tensor]:
    """Puts pieces together to global tensors, by key; what no piece covers is NaN."""
    wholes: dict[str, Tensor] = {}
    for piece in pieces:
        if piece.key not in wholes:
            wholes[piece.key] = torch.full(piece.global_shape, torch.nan, dtype=torch.float64)
        piece.slice_of(wholes[piece.key]).copy_(piece.data)
    return wholes
