"""Means over preference pairs and tokens that depend neither on micro-batches nor on the number of processes."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trl_multiagent.trainers.base.team_trainer import CommonTrainerMixin, num_own_rows


Means = Mapping[str, tuple[float, float]]  # the mean and the weight of each metric in a micro-batch


class PairMeansMixin(CommonTrainerMixin):
    """
    Weighs the micro-batches of a trainer on preference pairs.

    TRL takes the mean over a micro-batch, then over micro-batches and processes. This differs from the mean over all
    pairs if micro-batches have different numbers of pairs. In the last batch of an epoch, accelerate also repeats
    pairs until all processes have equally many. Here, repeated pairs are left out or have no weight, and a metric is a
    sum over all pairs, or tokens, divided by the sum of their weights.
    """

    _total_train_tokens: int
    _sizes: torch.Tensor  # means of `_count` over the micro-batches of all processes in the step
    # Since the last log, for each mode and metric: weighted sum and sum of the weights
    _sums: dict[str, dict[str, list[float]]]

    def _weights(self, batch: Any) -> torch.Tensor:
        """Returns the weights of the pairs in a batch: 1, or 0 for a repeated pair."""
        return batch["weights"]

    def _without_rows(self, batch: Any, own: int) -> Any:
        """Returns the first pairs of a batch, or its first pair with the weight zero if `own` is 0."""
        return first_pairs(batch, own)

    def _count(self, batch: Any) -> torch.Tensor:
        """Returns the numbers that the loss of a batch is divided by, without repeated pairs."""
        return self._weights(batch).sum().unsqueeze(0)

    def _keep_own_rows(self, batch: Any, dataset_length: int) -> Any:
        number = len(self._weights(batch))
        own = num_own_rows(self.accelerator, number, dataset_length)
        return batch if own == number else self._without_rows(batch, own)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches and not self.args.dataloader_drop_last:  # only the last batch of an epoch has repeated pairs
            batches[-1] = self._keep_own_rows(batches[-1], len(self.train_dataset))
        sizes = self.accelerator.reduce(sum(map(self._count, batches)).to(self.accelerator.device), "sum")
        self._sizes = sizes / (len(batches) * self.accelerator.num_processes)
        return batches, num_items

    def _add_means(self, means: Means) -> None:
        """Adds the means of a micro-batch to the next log entry. All processes must have the same metrics."""
        mode = "train" if self.model.training else "eval"
        rows = [[mean * weight if weight else 0.0, weight] for mean, weight in means.values()]
        added = self.accelerator.reduce(torch.tensor(rows, device=self.accelerator.device), "sum").tolist()
        for name, (total, weight) in zip(means, added, strict=True):
            sums = self._sums[mode].setdefault(name, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + total, sums[1] + weight
            self._metrics[mode][name] = [sums[0] / sums[1] if sums[1] else 0.0]

    def _count_tokens(self, number: torch.Tensor) -> None:
        """
        Adds the tokens of all processes' micro-batches to the logged number of tokens. Tokens of an evaluation do not
        count.
        """
        if self.model.training:
            self._total_train_tokens += int(self.accelerator.reduce(number, "sum").item())
        self._metrics["train" if self.model.training else "eval"]["num_tokens"] = [self._total_train_tokens]

    def _process_state(self) -> dict[str, Any]:
        return {**super()._process_state(), "num_tokens": self._total_train_tokens, "sums": self._sums}

    def _load_process_state(self, state: dict[str, Any]) -> None:
        super()._load_process_state(state)
        self._total_train_tokens, self._sums = state["num_tokens"], state["sums"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        self._sums["train" if self.model.training else "eval"].clear()


def first_pairs(batch: dict[str, torch.Tensor], own: int) -> dict[str, torch.Tensor]:
    """
    Returns the first `own` pairs of a batch, or its first pair with the weight zero if `own` is 0. The tensors have
    one row per pair, or one per answer: first all chosen, then all rejected ones.
    """
    number, keep = len(batch["weights"]), max(1, own)
    kept = {
        name: x[:keep] if len(x) == number else torch.cat([x[:keep], x[number : number + keep]])
        for name, x in batch.items()
    }
    return {**kept, "weights": kept["weights"] * (own > 0)}
