"""Evaluation of teams: pass@k with confidence intervals, baselines, cross-play. See docs/evaluation.md."""
