"""The checks of `cusearch check`: the work of a step, GPUs and their memory, files, services."""
