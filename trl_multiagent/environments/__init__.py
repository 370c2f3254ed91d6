from trl_multiagent.environments.base import Environment, FunctionEnvironment, JointAction, Outcome, Prompt, Turn


__all__ = ["Environment", "FunctionEnvironment", "JointAction", "Outcome", "Prompt", "Turn"]
