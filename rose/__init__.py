"""ROSE: agentic-RL rollouts on serving GPUs, without hurting the serving SLO."""

__version__ = "0.1.0"
