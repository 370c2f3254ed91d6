"""Metrics and reliability plot of a reward model on held-out pairs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trl_multiagent.report.pictures import COLORS, GREY, draw_shares, picture


BINS = 5  # of confidences, and of reward gaps


@dataclass
class HeldOut:
    """The scores that a reward model gives to held-out pairs."""

    chosen: np.ndarray  # of shape `(num_pairs,)`, like the other fields
    rejected: np.ndarray
    chosen_rewards: np.ndarray | None = None  # the joint rewards from which the pairs were made, if known
    rejected_rewards: np.ndarray | None = None

    @property
    def margins(self) -> np.ndarray:
        return self.chosen - self.rejected

    @property
    def gaps(self) -> np.ndarray | None:
        return None if self.chosen_rewards is None else self.chosen_rewards - self.rejected_rewards

    def confidence_bins(self) -> pd.DataFrame:
        """
        Returns the accuracy by confidence, see [`bins`]. Confidence is the probability, 0.5 to 1, of the model's own
        order of a pair.
        """
        confidences = 1 / (1 + np.exp(-np.abs(self.margins)))
        return bins(confidences, self.margins > 0, np.linspace(0.5, 1.0, BINS + 1))

    def gap_bins(self) -> pd.DataFrame:
        """
        Returns the accuracy of pairs with similar reward gaps, see [`bins`]. The bins have about the same number of
        pairs.
        """
        if self.gaps is None:
            return bins(np.empty(0), np.empty(0), np.zeros(1))
        return bins(self.gaps, self.margins > 0, np.unique(np.quantile(self.gaps, np.linspace(0, 1, BINS + 1))))

    @property
    def calibration_error(self) -> float:
        """
        The expected calibration error: the mean distance between confidence and accuracy over the bins, weighted by
        their sizes.
        """
        frame = self.confidence_bins()
        return float((frame["count"] * (frame["mean"] - frame["accuracy"]).abs()).sum() / len(self.margins))

    def reward_scale(self) -> tuple[float, float] | None:
        """
        Fits `reward = slope * score + intercept` by least squares. Returns `None` without rewards, or if all scores
        are the same.
        """
        scores = np.concatenate([self.chosen, self.rejected])
        if self.chosen_rewards is None or self.rejected_rewards is None or np.ptp(scores) == 0.0:
            return None
        slope, intercept = np.polyfit(scores, np.concatenate([self.chosen_rewards, self.rejected_rewards]), 1)
        return float(slope), float(intercept)

    def metrics(self) -> dict[str, float]:
        """
        Returns accuracy, mean margin, calibration error, and the accuracies of the smallest and the largest gaps.
        """
        values = {"accuracy": float((self.margins > 0).mean()), "margin": float(self.margins.mean())}
        values["calibration_error"] = self.calibration_error
        accuracies = self.gap_bins()["accuracy"].tolist()
        if accuracies:
            values |= {"accuracy_small_gaps": accuracies[0], "accuracy_large_gaps": accuracies[-1]}
        return values

    def facts(self) -> dict[str, Any]:
        """Returns the metrics and both kinds of bins as plain values."""
        facts: dict[str, Any] = {"pairs": len(self.margins), **self.metrics()}
        facts["by_confidence"] = self.confidence_bins().to_dict("records")
        return {**facts, "by_reward_gap": self.gap_bins().to_dict("records")}


def bins(values: np.ndarray, is_correct: np.ndarray, edges: np.ndarray) -> pd.DataFrame:
    """
    Returns the lowest, highest and mean value, the accuracy and the size of each nonempty bin. The last bin includes
    its upper edge.
    """
    numbers = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, max(0, len(edges) - 2))
    groups = pd.DataFrame({"value": values, "correct": is_correct}).groupby(numbers)
    ends = {"low": ("value", "min"), "high": ("value", "max"), "mean": ("value", "mean")}
    return groups.agg(**ends, accuracy=("correct", "mean"), count=("correct", "size"))


def draw_report(held_out: HeldOut, path: Path) -> None:
    """
    Plots a reliability diagram, and the accuracy by reward gap; without rewards, the distribution of the margins.
    """
    gaps = held_out.gap_bins()
    accuracy, error = held_out.metrics()["accuracy"], held_out.calibration_error
    ylabel = "share of pairs in the right order, 95 % interval"
    with picture(path, panels=2) as (left, right):
        left.plot([0.5, 1], [0.5, 1], color=GREY, linestyle=":", label="perfectly calibrated")
        draw_shares(left, held_out.confidence_bins(), COLORS[0])
        left.set(title=f"Reliability, calibration error {error:.2f}", xlabel="confidence of the model", ylabel=ylabel)
        if len(gaps):
            right.axhline(0.5, color=GREY, linestyle="--", label="chance")
            draw_shares(right, gaps, COLORS[2])
            right.set(title=f"Accuracy {accuracy:.0%}, by reward gap", xlabel="reward gap of the pair", ylabel=ylabel)
        else:
            right.hist(held_out.margins, 16, color=COLORS[2])
            right.set(title="Margins", xlabel="score of the chosen minus that of the rejected answer", ylabel="pairs")
