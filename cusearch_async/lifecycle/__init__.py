"""Process set-up: command line, CPU and GPU placement, signals, child processes."""
