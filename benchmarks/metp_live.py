"""Dispatch modes of ``benchmarks/metp.py``: counts by what a tensor is; arithmetic left out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_longseq.measurement import LiveBytes, LiveStorage

_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


class WithoutArithmetic(TorchDispatchMode):
    """Gives the results of products and attention kernels their shapes, dtypes and strides only.

    What is alive does not depend on values, and nearly all the time of a long sequence goes into
    these. To be entered before a :class:`LiveBytes`, which then counts the zeros as it would count
    the results; the benchmark compares one run with and without arithmetic.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name == "aten::mm":
            return args[0].new_zeros(args[0].shape[0], args[1].shape[1])
        if name == "aten::addmm":
            return args[1].new_zeros(args[1].shape[0], args[2].shape[1])
        if name == _ATTENTION:
            query, _, value = args[:3]
            batch, heads, rows, _ = query.shape
            out = query.new_zeros(batch, rows, heads, value.shape[3]).transpose(1, 2)
            return out, query.new_zeros(batch, rows, heads, dtype=torch.float32).transpose(1, 2)
        if name == _ATTENTION + "_backward":
            return tuple(_rows_outermost(tensor) for tensor in args[1:4])
        return func(*args, **(kwargs or {}))


def _rows_outermost(like: Tensor) -> Tensor:
    batch, heads, rows, width = like.shape
    return like.new_zeros(batch, rows, heads, width).transpose(1, 2)


class LiveByRole(LiveBytes):
    """The most bytes of some kinds of tensors that were alive after any operator.

    Args:
        role: what a live storage is, from it and the dtype of the operator's result that made it;
            None if it is not to be looked at.
        counted: the roles whose sum is to be largest.

    Attributes:
        at_most: bytes by role when the counted ones were most.
    """

    def __init__(
        self,
        role: Callable[[LiveStorage, torch.dtype | None], str | None],
        counted: tuple[str, ...],
    ) -> None:
        super().__init__()
        self._role = role
        self._counted = counted
        self._most = -1
        self._dtypes: dict[int, torch.dtype] = {}
        self.at_most: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Addresses of what has died are used again: forget them before there are new results.
        living = {storage.address for storage in self.alive()}
        self._dtypes = {a: dtype for a, dtype in self._dtypes.items() if a in living}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._dtypes.setdefault(tensor.untyped_storage()._cdata, tensor.dtype)
        roles: dict[str, int] = {}
        for storage in self.alive():
            role = self._role(storage, self._dtypes.get(storage.address))
            if role is not None:
                roles[role] = roles.get(role, 0) + storage.bytes
        counted = sum(roles.get(role, 0) for role in self._counted)
        if counted > self._most:
            self._most, self.at_most = counted, roles
        return result


class LargestSquare(TorchDispatchMode):
    """The largest fp32 result whose last two dimensions are both among some lengths.

    Attributes:
        bytes: its size. A block of scores ``[.., rows, keys]`` is one, if no width is a length.
    """

    def __init__(self, lengths: set[int]) -> None:
        super().__init__()
        self._lengths = lengths
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            isinstance(result, Tensor)
            and result.dim() > 2
            and result.dtype == torch.float32
            and set(result.shape[-2:]) <= self._lengths
        ):
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result
