"""What several commands share: arguments, the run in Redis, its processes and their screen, plots and pages."""
