"""The losses, norms and learning rates of a training, window by window."""

from accum_sweep.boundary import Outcome, Step


class History:
    """All windows so far. Good at any moment, also after an interrupt in the middle of `add`."""

    def __init__(self) -> None:
        self._series: dict[str, list[float]] = {
            name: [] for name in ("train/loss", "train/grad_norm", "train/clipped_norm", "train/lr")
        }
        self._micro: list[float] = []
        self.outcomes: list[Outcome] = []

    def add(self, step: Step) -> None:
        """Remember a window's end."""
        self._micro += step.micro_losses
        numbers = (step.loss, step.grad_norm, step.clipped_norm, step.lr)
        for series, number in zip(self._series.values(), numbers, strict=True):
            series.append(number)
        self.outcomes.append(step.outcome)  # last: what it does not count, `series` leaves out

    def series(self) -> dict[str, list[float]]:
        """Return the series by window, and `train/micro_loss` by micro-batch.

        Losses are means over items: over those of the whole window, and over those of the micro-batch. Where nothing
        was clipped, `train/clipped_norm` is left out.
        """
        windows = {name: values[: len(self.outcomes)] for name, values in self._series.items()}
        if windows["train/clipped_norm"] == windows["train/grad_norm"]:
            del windows["train/clipped_norm"]
        return windows | {"train/micro_loss": self._micro[:]}
