"""What each process of a run builds and runs, one module a process."""
