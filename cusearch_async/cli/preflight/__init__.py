"""What `cusearch check` looks at: the work of a step, GPUs and their memory, files, services."""
