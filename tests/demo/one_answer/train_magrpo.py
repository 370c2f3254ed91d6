"""
The demo's recipe, with one answer in place of four to each held-out problem, and after the training to 16 of them.
"""

import os
import runpy
import sys

from transformers import logging

from trl_multiagent.configs.recipes.demo.report import DemoReport


def on_train_end(self, *args, on_train_end=DemoReport.on_train_end, **kwargs):
    self.items = self.items[:16]
    on_train_end(self, *args, **kwargs)


sys.stderr.write(os.environ["TESTS_IMPORTED"])
logging.set_verbosity_warning()  # below it there is no progress bar
DemoReport.__init__.__defaults__ = (1,)
DemoReport.on_train_end = on_train_end
runpy.run_path("recipes/code_generation/train_magrpo.py", run_name="__main__")
