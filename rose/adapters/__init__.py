"""RL frameworks on ROSE, where a base URL is not enough: see docs/integrate.md.

Nothing here imports a framework before it is used.
"""
