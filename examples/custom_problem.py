"""A problem of one's own, whole: a model with two inputs, curves of unequal length, a held-out metric.

In this folder:

    python -m accum_sweep -m problem=custom problem.factory=custom_problem:make problem.samples=512 \
        'problem.arguments={hidden: 32}' effective_batch_size=64 accum_steps=1,2,4

Each sample is a damped oscillation, given by its frequency and damping, and measured at 4 to 20 times. The model learns
to predict the measurements. An item is one measurement, so micro-batches of equally many curves differ in items; the
gradient is the full batch's all the same, because the loss says how many items there were.
"""

import torch
from torch import Tensor, nn

from accum_sweep.problems import Problem

SAMPLES = 512  # problem.samples must say the same
TEST_SAMPLES = 128
LONGEST = 20  # measurements

Batch = dict[str, Tensor]  # n curves of t = LONGEST times, padded at the end


class Oscillation(nn.Module):
    """A value for each time, from the two numbers of its curve and the time: (n, 2) and (n, t) to (n, t)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.curve = nn.Linear(2, hidden)
        self.time = nn.Linear(1, hidden)
        self.value = nn.Sequential(nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, parameters: Tensor, times: Tensor) -> Tensor:
        """Add up what the curve and the time say, and read the value from that."""
        both = self.curve(parameters).unsqueeze(1) + self.time(times.unsqueeze(2))  # (n, t, hidden)
        values: Tensor = self.value(both).squeeze(2)
        return values


def make(dtype: torch.dtype, hidden: int = 32, noise: float = 0.05) -> Problem:
    """Return the problem; `problem.arguments` are the keywords. The run has seeded torch: use its generator."""
    model = Oscillation(hidden).to(dtype)
    train, test = curves(SAMPLES, noise, dtype), curves(TEST_SAMPLES, 0.0, dtype)

    def evaluate(model: nn.Module, device: torch.device) -> dict[str, float]:
        with torch.no_grad():
            loss_sum, items = squared_error(model, {name: column.to(device) for name, column in test.items()})
        return {"test/loss": float(loss_sum / items)}

    return Problem(model, train, squared_error, evaluate=evaluate)


def squared_error(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss *summed* over the measurements, and their number. Padding is neither."""
    errors = model(batch["parameters"], batch["times"]) - batch["values"]
    return (errors.square() * batch["measured"]).sum(), batch["measured"].sum()


def curves(samples: int, noise: float, dtype: torch.dtype) -> Batch:
    """Make the data, a mapping from names to columns; a batch that the loss is given has the same form."""
    parameters = torch.rand(samples, 2, dtype=dtype)  # frequency and damping
    times = torch.rand(samples, LONGEST, dtype=dtype) * 3
    frequency, damping = (1 + 3 * parameters[:, :1]), parameters[:, 1:]
    values = torch.sin(frequency * times) * torch.exp(-damping * times)
    lengths = torch.randint(4, LONGEST + 1, (samples, 1))
    measured = torch.arange(LONGEST) < lengths  # (samples, LONGEST)
    values = values + noise * torch.randn_like(values)
    return {"parameters": parameters, "times": times, "values": values, "measured": measured}
