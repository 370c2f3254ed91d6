"""Imports the sandbox without the rest of the package; scripts of these tests start with `from isolated import *`."""

import sys
import types
from pathlib import Path


package = types.ModuleType("trl_multiagent")
package.__path__ = [str(Path(__file__).parents[2] / "trl_multiagent")]
sys.modules["trl_multiagent"] = package

from trl_multiagent.sandbox import Program, Sandbox, SandboxError  # noqa: E402


__all__ = ["Program", "Sandbox", "SandboxError"]
