"""Asynchronous reinforcement learning for search agents."""

__version__ = "0.1.0"
