"""
The demo's recipe, with one answer in place of four to each held-out problem, and after the training to 16 of them.
"""

import runpy

from trl_multiagent.configs.recipes.demo.report import DemoReport


def on_train_end(self, *args, on_train_end=DemoReport.on_train_end, **kwargs):
    self.items = self.items[:16]
    on_train_end(self, *args, **kwargs)


DemoReport.__init__.__defaults__ = (1,)
DemoReport.on_train_end = on_train_end
runpy.run_path("recipes/code_generation/train_magrpo.py", run_name="__main__")
