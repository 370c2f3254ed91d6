"""Shows one progress bar in place of the lines of the log."""

from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, Trainer, TrainerState, TrainingArguments


# The metrics that the bar shows if they are logged, and their names in the bar
SHOWN = {
    "reward": "reward",
    "return": "return",
    "turn_1/test_pass_rate": "tests passed",
    "turn_1/passed": "solved",
    "eval_reward": "eval reward",
    "rewards/accuracies": "accuracy",
    "accuracy": "accuracy",  # of a reward model
}


class RewardProgressCallback(ProgressCallback):
    """
    Shows the latest reward, return and pass rate in the progress bar, and the metrics that the environment watches.
    """

    def __init__(self, watched: Sequence[str] = ()):
        super().__init__()
        self.names = {**SHOWN, **{f"turn_1/{name}": name for name in watched}}
        self.latest: dict[str, str] = {}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=state.max_steps, desc="Training", unit="step", dynamic_ncols=True)
        self.current_step = 0

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or self.training_bar is None:
            return
        self.latest |= {shown: f"{logs[name]:.2f}" for name, shown in self.names.items() if name in logs}
        texts = (f"{name} {value}" for name, value in self.latest.items())
        self.training_bar.set_postfix_str(", ".join(texts), refresh=False)


def show_one_bar(trainer: Trainer, watched: Sequence[str] = ()) -> None:
    """Replaces the lines that a trainer prints at every log by one progress bar, unless `disable_tqdm` is set."""
    if not trainer.args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(RewardProgressCallback(watched))
