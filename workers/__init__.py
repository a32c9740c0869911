"""The processes of a run, for a checkout: `python -m workers.NAME CONFIG` is `cusearch worker NAME CONFIG`."""
