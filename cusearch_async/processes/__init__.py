"""The processes of a run, one module each."""
