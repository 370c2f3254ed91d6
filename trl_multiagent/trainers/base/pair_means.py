"""Means over preference pairs and tokens that depend neither on micro-batches nor on the number of processes."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.trainer_utils import EvalLoopOutput

from trl_multiagent.trainers.base.team_trainer import CommonTrainerMixin, num_own_rows


class PairMeansMixin(CommonTrainerMixin):
    """
    Weighs the micro-batches of a trainer on preference pairs.

    TRL takes the mean over a micro-batch, then over micro-batches and processes. This differs from the mean over all
    pairs if micro-batches have different numbers of pairs. In the last batch of an epoch, accelerate also repeats
    pairs until all processes have equally many. Here, repeated pairs have no weight, and a metric is a
    sum over all pairs, or tokens, divided by the sum of their weights.
    """

    _total_train_tokens: int
    _sizes: torch.Tensor  # means of `_count` over the micro-batches of all processes in the step
    # Since the last log, for each mode and metric: weighted sum and sum of the weights
    _sums: dict[str, dict[str, list[float]]]
    _eval_losses: list[torch.Tensor]  # of the micro-batches of an evaluation: sums, and what they are divided by

    def _count(self, batch: Any) -> torch.Tensor:
        """Returns the numbers that the loss of a batch is divided by, without repeated pairs."""
        return batch["weights"].sum().unsqueeze(0)

    def _mark_repeated(self, batch: Any) -> None:
        """Sets the weights of repeated pairs to 0."""
        batch["weights"][num_own_rows(self.accelerator, len(batch["weights"])) :] = 0.0

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches and not self.args.dataloader_drop_last:  # only the last batch of an epoch has repeated pairs
            self._mark_repeated(batches[-1])
        sizes = self.accelerator.reduce(sum(map(self._count, batches)).to(self.accelerator.device), "sum")
        self._sizes = sizes / (len(batches) * self.accelerator.num_processes)
        return batches, num_items

    def _mean_loss(self, sums: torch.Tensor, batch: Any) -> torch.Tensor:
        """
        Returns the loss of a micro-batch from its sums, without repeated pairs. Each is divided by a number of
        [`~PairMeansMixin._count`]: in training by the whole step's.
        """
        if self.model.training:
            return (sums / self._sizes).sum()
        sizes = self._count(batch)
        self._eval_losses.append(torch.stack([sums.detach(), sizes]))
        return (sums / sizes.clamp(min=1)).sum()

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._mark_repeated(inputs)
        return super().prediction_step(model, inputs, True)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        self._eval_losses = []
        self._sums["eval"].clear()
        output = super().evaluation_loop(*args, **kwargs)
        if self._eval_losses:  # the mean over pairs and tokens; `Trainer` takes it over batches
            totals, sizes = self.accelerator.reduce(torch.stack(self._eval_losses).sum(dim=0), "sum")
            output.metrics[f"{kwargs['metric_key_prefix']}_loss"] = (totals / sizes.clamp(min=1)).sum().item()
        return output

    def _add_means(self, sums: Mapping[str, torch.Tensor]) -> None:
        """
        Adds the means of a micro-batch to the next log entry. `sums`: for each metric, its weighted sum and the sum of
        the weights. All processes must have the same metrics.
        """
        mode = "train" if self.model.training else "eval"
        added = self.accelerator.reduce(torch.stack([*sums.values()]), "sum").tolist()
        for name, (total, weight) in zip(sums, added, strict=True):
            so_far = self._sums[mode].setdefault(name, [0.0, 0.0])
            so_far[0], so_far[1] = so_far[0] + total, so_far[1] + weight
            self._metrics[mode][name] = [so_far[0] / so_far[1] if so_far[1] else 0.0]

    def _count_tokens(self, number: torch.Tensor) -> None:
        """
        Adds the tokens of all processes' micro-batches to the logged number of tokens. Tokens of an evaluation do not
        count.
        """
        if self.model.training:
            self._total_train_tokens += int(self.accelerator.reduce(number, "sum").item())
        self._metrics["train" if self.model.training else "eval"]["num_tokens"] = [self._total_train_tokens]

    def _begin_training(self) -> None:
        self._sums["train"].clear()  # an interrupted training has left some
        super()._begin_training()

    def _process_state(self) -> dict[str, Any]:
        return {**super()._process_state(), "num_tokens": self._total_train_tokens, "sums": self._sums}

    def _load_process_state(self, state: dict[str, Any]) -> None:
        super()._load_process_state(state)
        self._total_train_tokens, self._sums = state["num_tokens"], state["sums"]

    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(*args, **kwargs)
        self._sums["train" if self.model.training else "eval"].clear()
