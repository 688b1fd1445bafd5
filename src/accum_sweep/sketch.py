"""A few numbers that stand for a model's weights, such that the distance of two models can be told from theirs.

A count sketch (Charikar, Chen, Farach-Colton 2002): every weight is added to one of SIZE numbers, with a sign, both
chosen by a hash of its position. The sketch of a difference is the difference of the sketches, so its length estimates
the distance of the weights, without bias in the square and with a standard error of 1/sqrt(2 SIZE): 4.4 %.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

SIZE = 256
CHUNK = 1 << 20  # weights at a time


def sketch(tensors: Iterable[Tensor]) -> list[float]:
    """Return the sketch of all entries together, in float64."""
    total = torch.zeros(SIZE, dtype=torch.float64)
    position = 0
    for tensor in tensors:
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        for chunk in tensor.detach().flatten().split(CHUNK):  # type: ignore[no-untyped-call]
            bucket, sign = _hash(torch.arange(position, position + len(chunk)))
            total.index_add_(0, bucket, chunk.double() * sign)
            position += len(chunk)
    return total.tolist()


def _hash(position: Tensor) -> tuple[Tensor, Tensor]:
    """Return bucket and sign: the splitmix64 finalizer (Steele, Lea, Flood 2014), the same everywhere."""
    x = position * -7046029254386353131  # 2**64 / golden ratio, as a signed number
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return x & (SIZE - 1), ((x >> 20) & 1) * 2.0 - 1
