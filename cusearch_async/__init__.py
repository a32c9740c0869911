"""Asynchronous reinforcement learning for search agents."""

__version__ = "0.2.0.dev0"
