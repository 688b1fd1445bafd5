"""What `precision` means: the type of the weights, the type of the arithmetic, and how finely it rounds.

| precision   | weights, gradients | arithmetic of matrix products |
|-------------|--------------------|-------------------------------|
| fp64, fp32  | the same           | the same; fp32 is never TF32 in disguise |
| tf32        | fp32               | TF32, on CUDA |
| bf16, fp16  | fp32               | bf16 or fp16, by autocast; fp16 with a gradient scaler |
| bf16-params | bf16               | bf16 |
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from accum_sweep.errors import UserError

WEIGHTS = {"fp64": torch.float64, "bf16-params": torch.bfloat16}  # float32 otherwise
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
TF32_FRACTION_BITS = 10


def weights_dtype(precision: str) -> torch.dtype:
    """Return the type of weights, gradients and data."""
    return WEIGHTS.get(precision, torch.float32)


def unit_roundoff(precision: str) -> float:
    """Return the largest relative error of one rounding in the arithmetic: half the distance from 1 to the next."""
    if precision == "tf32":
        return 2.0 ** -(TF32_FRACTION_BITS + 1)
    return torch.finfo(AUTOCAST.get(precision, weights_dtype(precision))).eps / 2


def arithmetic(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a model computes its output and its loss."""
    dtype = AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


@contextmanager
def matrix_products(precision: str, device: torch.device) -> Iterator[None]:
    """Allow TF32 where it is asked for and nowhere else, as long as a run lasts.

    Raises UserError where the device has no such arithmetic.
    """
    if precision == "tf32" and device.type != "cuda":
        raise UserError(f"precision=tf32 needs a CUDA device, but device is {device}; use precision=fp32")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
