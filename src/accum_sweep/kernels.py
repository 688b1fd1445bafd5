"""What kernels on the CPU take for themselves: buffers that come and go within one operation.

A ledger does not see them. They are learned by running an operation once, alone, on zeros of the same form. They depend
on the library behind torch, on the processor and on the number of threads; so nothing of them is written down here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from accum_sweep.memory import measure_peak

aten = torch.ops.aten
CPU = torch.device("cpu")
ALWAYS = {
    aten.convolution.default,
    aten.convolution_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm_backward.default,
    aten.native_batch_norm_backward.default,
}
# oneDNN multiplies matrices of half precision in a layout of its own.
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
HALF = (torch.bfloat16, torch.float16)
LARGEST = 2**27  # bytes of an operation's tensors: larger ones are not run, and their buffers not counted


Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, type


def own_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """Return the bytes an operation takes beyond what it is given and returns, at their peak."""
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not _may_take(func, tensors) or sum(tensor.nbytes for tensor in tensors) > LARGEST:
        return 0
    forms = tuple(_form(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    if (func, forms) not in _learned:
        with _disable_current_modes(), torch.no_grad():
            leaves = [_zeros(_form(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            _learned[func, forms] = _learn(func, *tree_unflatten(leaves, spec))
    return _learned[func, forms]


_learned: dict[tuple[Any, tuple[Form | str, ...]], int] = {}


def _may_take(func: Any, tensors: Sequence[Tensor]) -> bool:
    dtypes = {tensor.dtype for tensor in tensors if tensor.dim() and tensor.is_floating_point()}
    # Arguments of several types are cast to one first.
    return func in ALWAYS or (func in PRODUCTS and not dtypes.isdisjoint(HALF)) or len(dtypes) > 1


def _learn(func: Any, args: Any, kwargs: Any) -> int:
    made: list[Any] = []
    peak = measure_peak(lambda: made.append(func(*args, **kwargs)), CPU).allocated_bytes or 0
    given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    returned = {id(leaf.untyped_storage()): leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)}
    return peak - sum(leaf.untyped_storage().nbytes() for key, leaf in returned.items() if key not in given)


def _form(tensor: Tensor) -> Form:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _zeros(form: Form) -> Tensor:
    shape, stride, dtype = form
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return torch.zeros(0 if 0 in shape else last + 1, dtype=dtype).as_strided(shape, stride)
