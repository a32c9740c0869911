"""The processes of a run by a short name, for a checkout: `python -m workers.NAME CONFIG [--section.key value]...`."""
