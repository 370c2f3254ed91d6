"""
Rollouts that are sampled one optimizer step ahead: `rollouts_ahead`.

While the update of a step is computed, a thread plays the trees of the next step. It waits for the environment: tools,
judges, sandboxes, vLLM servers. The agents themselves compute in the main thread alone, before a micro-batch or after
the last one, so nothing has to be locked. The weights change only when the thread has ended. What a completion draws
depends on its place in the trees, so the order of the two threads changes nothing.
"""

import contextlib
import copy
import itertools
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trl_multiagent.environments.base import AgentCall, Reply, TextPrompt
from trl_multiagent.environments.task_errors import task_code
from trl_multiagent.jobs.distributed import fail_together
from trl_multiagent.jobs.event_loop import CLOSING_SECONDS, WAITED_FOR
from trl_multiagent.jobs.signals import at_most, in_task_code
from trl_multiagent.models.pretrained import temporarily_set
from trl_multiagent.rollout.tree import ByRole, Node, RolloutCallback, Samples, Trees
from trl_multiagent.trainers.base.batch import Row
from trl_multiagent.trainers.base.metrics import Observer


ROWS_FILE = "rows_ahead_{}.pt"  # in a checkpoint: the rows of the next step, of one process
Call = tuple[Future, list[Node], int]
Calls = queue.SimpleQueue[Call | None]
IN_ROWS = [Row, Samples, AgentCall, Reply, TextPrompt]  # classes of the objects in it


def check_ahead(args: Any) -> None:
    """Raises `ValueError` if the arguments of a trainer, a [`RolloutConfig`], do not allow `rollouts_ahead`."""
    problem = None
    if args.use_vllm and args.vllm_mode == "colocate":
        problem = "an engine in the training process needs the memory of the update: set `vllm_mode: server`"
    elif args.use_vllm and args.world_size > 1:
        problem = "several processes ask a vLLM server together, which they cannot do during an update"
    elif args.world_size > 1 and args.zero_stage == 3:
        problem = "under ZeRO-3, processes gather weights together to sample, which they cannot do during an update"
    elif not args.use_vllm and (
        args.top_p < 1 or args.top_k or args.min_p or args.repetition_penalty != 1 or args.generation_kwargs
    ):
        problem = "the ratio of the policies is of all tokens: sample with `temperature` alone"
    if problem is not None:
        raise ValueError(f"`rollouts_ahead` is 1, but {problem}. Or set `rollouts_ahead` to 0.")


class Ahead(RolloutCallback):
    """Samples the next batch of a trainer, a [`RolloutTrainer`]."""

    is_making = False  # the rows of the next step

    def __init__(self, trainer: Any):
        if isinstance(trainer.train_dataset, IterableDataset):
            raise ValueError("`rollouts_ahead` needs items that can be looked up, but `train_dataset` is a stream.")
        self.trainer = trainer
        trainer.add_callback(self)
        self.rows: list[Row] | None = None  # of the next step
        # What a thread asks the agents: the answer, and the arguments of the sampler. At its end, `None`
        self.calls = Calls()

    def take(self) -> list[Row] | None:
        """Returns the rows of this step, if they have been sampled."""
        rows, self.rows = self.rows, None
        return rows

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Samples the next batch within the block, if there is one, and this is the last step on the current one."""
        trainer, step = self.trainer, self.trainer.state.global_step + 1
        if step % trainer.num_iterations != 0 or step >= trainer.state.max_steps:
            yield
            return
        trainer._may_stop = False  # a checkpoint of the step before would lack the rows that this step has taken
        self.calls, self.trees, self.is_given_up, self.waited = Calls(), Future[Trees](), False, 0.0
        self.player = player = copy.copy(trainer)  # is in the next step, and counts its own time
        player.state, player.observer = copy.copy(trainer.state), Observer(player)
        player.state.global_step = step
        if trainer.args.use_vllm:
            trainer.generator.send(trainer.team.roles)
        else:
            player._sample = self._ask
        thread = threading.Thread(target=self._play, args=[items_of(trainer, step)], daemon=True)
        thread.start()
        try:
            if not trainer.args.use_vllm:  # so that the environment has something to do during the first micro-batch
                with fail_together(trainer.accelerator):
                    self._answer_next()
            yield
            with temporarily_set(self, is_making=True):
                self.rows = trainer._make_rows(self._finish)
        finally:
            self.is_given_up = True
            self.serve()
            if future := WAITED_FOR.get(thread.ident or 0):
                future.cancel()
            thread.join(CLOSING_SECONDS)

    # In the main thread

    def serve(self) -> None:
        """Answers what the thread has asked."""
        while not self.calls.empty():
            self._answer(self.calls.get())

    def _answer_next(self) -> None:
        """Waits for the thread to ask, and answers."""
        observer, start = self.trainer.observer, time.perf_counter()
        limit = getattr(self.trainer.environment.unwrapped, "reward_timeout", None)
        late = f"did not answer within {limit} seconds: raise `reward_timeout` if needed"
        with in_task_code(), task_code("The environment"), at_most(limit, late), observer.timed("reward"):
            call = self.calls.get()
        self.waited += time.perf_counter() - start
        self._answer(call)

    def _answer(self, call: Call | None) -> None:
        if call is None:
            return
        answer, *arguments = call
        if self.is_given_up:
            answer.cancel()
            return
        try:
            answer.set_result(self.trainer._sample(*arguments))
        except BaseException as error:
            answer.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def _finish(self) -> Trees:
        """Returns the trees when they have been played. Raises the error of the thread."""
        while not self.trees.done():
            self._answer_next()
        observer = self.trainer.observer
        observer.reported = self.player.observer.reported
        observer.seconds["overlapped"] += self.seconds - self.waited
        return self.trees.result()

    # In the thread

    def _play(self, items: list[dict]) -> None:
        device = self.trainer.accelerator.device
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
        self.seconds = -time.perf_counter()  # that the environment takes
        try:
            trees = self.player._play_trees(items)
            self.seconds += time.perf_counter()
            self.trees.set_result(trees)
        except BaseException as error:  # exits and interrupts too, which the main thread raises
            self.trees.set_exception(error)
        self.calls.put(None)

    def _ask(self, nodes: list[Node], num_generations: int) -> ByRole:
        answer: Future = Future()
        self.seconds += time.perf_counter()
        self.calls.put((answer, nodes, num_generations))
        if self.is_given_up:
            answer.cancel()
        samples = answer.result()
        self.seconds -= time.perf_counter()
        return samples

    # A run that resumes begins with the rows in its checkpoint

    def on_checkpoint(self) -> None:
        trainer = self.trainer
        if self.rows is not None:
            folder = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
            path = Path(trainer._get_output_dir(None), folder, ROWS_FILE.format(trainer.args.process_index))
            torch.save(self.rows, path)

    def on_train_begin(self, args: Any, *others: Any, **kwargs: Any) -> None:
        self.rows, resumed = None, self.trainer._resumed
        if resumed is not None and (path := resumed / ROWS_FILE.format(args.process_index)).is_file():
            with torch.serialization.safe_globals(IN_ROWS):
                self.rows = torch.load(path, weights_only=True)


def items_of(trainer: Any, step: int) -> list[dict]:
    """Returns the items of this process in an optimizer step, which its dataloader gives later."""
    size, data = trainer.args.items_per_device, trainer.train_dataset
    epoch, k = divmod(step, trainer.args.steps_per_epoch(len(data)))
    sampler = trainer._get_train_sampler(data)
    sampler.set_epoch(epoch)
    start = (k * trainer.args.world_size + trainer.args.process_index) * size
    return [data[k] for k in itertools.islice(sampler, start, start + size)]
