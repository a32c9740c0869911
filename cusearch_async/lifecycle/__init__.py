"""How a process of ours starts, where it runs, how it is asked to stop, and the processes that it starts itself."""
